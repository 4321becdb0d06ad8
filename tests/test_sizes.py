"""Sizes of the plan: those of the user, or automatic ones with a note."""

import pytest

from jaxspec.config import EngineConfig
from tests.plans import note_of, notes_of, plan_of, refusal


def test_page_size_and_pool_come_from_the_caller_unless_told():
    plan = plan_of("NGRAM", page_size_default=64, max_total_tokens_default=1000)
    assert (plan.page_size, plan.num_pages, plan.max_model_len) == (64, 16, 1024)
    note = note_of(plan, "max_total_tokens")
    assert (note.after, note.reason) == (1024, "what the memory has room for; set max_total_tokens")
    ample = note_of(plan_of(engine=EngineConfig(max_running_requests=2)), "max_total_tokens")
    assert "enough for 2 requests of 4096 tokens; set max_total_tokens" in ample.reason
    assert "KV pool" in note_of(plan, "max_model_len").reason
    engine = EngineConfig(page_size=10, max_total_tokens=1000, max_model_len=500)
    told = plan_of("NGRAM", engine=engine)
    assert (told.page_size, told.num_pages, told.max_model_len) == (10, 100, 500)
    assert not notes_of(told, "page_size", "max_total_tokens", "max_model_len")


def test_a_pool_is_rounded_up_to_whole_pages_with_a_note():
    plan = plan_of(engine=EngineConfig(page_size=16, max_total_tokens=100))
    note = note_of(plan, "max_total_tokens")
    assert (plan.num_pages, note.before, note.after, note.kind) == (7, 100, 112, "override")
    assert "whole pages of page_size=16; set max_total_tokens=112" in note.reason


def test_the_context_is_the_targets_and_no_longer():
    assert plan_of().max_model_len == 4096
    assert plan_of(engine=EngineConfig(max_model_len=4096)).max_model_len == 4096
    message = refusal(engine=EngineConfig(max_model_len=4097))
    assert "max_model_len=4097" in message
    assert "4096 positions" in message
    assert "at most 4096" in message


def test_a_context_that_the_pool_cannot_hold_is_noted():
    plan = plan_of(engine=EngineConfig(max_model_len=1024, max_total_tokens=256))
    note = note_of(plan, "max_model_len")
    assert (plan.max_model_len, note.kind) == (1024, "warning")
    assert "holds 256 tokens" in note.reason
    assert "set max_total_tokens=1024" in note.reason


@pytest.mark.parametrize(
    ("settings", "chunk", "rows", "chunks"),
    [
        ({}, 512, (1, 2, 4, 8, 16, 32, 48), (64, 256, 512)),
        ({"max_running_requests": 1, "chunked_prefill_size": 64}, 64, (1,), (64,)),
        ({"max_model_len": 40}, 40, (1, 2, 4, 8, 16, 32, 48), (40,)),
        ({"chunked_prefill_size": None, "max_model_len": 1000}, 1000, (1, 2, 4, 8, 16, 32, 48), (64, 256, 1000)),
        ({"decode_row_buckets": [6, 3], "prefill_chunk_buckets": [900]}, 512, (3, 6), (900,)),
    ],
)
def test_the_shapes_that_are_compiled_are_in_the_plan_with_notes_unless_told(settings, chunk, rows, chunks):
    plan = plan_of(engine=EngineConfig(**settings))
    assert (plan.chunked_prefill_size, plan.decode_row_buckets, plan.prefill_chunk_buckets) == (chunk, rows, chunks)
    for field, value in [("decode_row_buckets", rows), ("prefill_chunk_buckets", chunks)]:
        if field in settings:
            assert not notes_of(plan, field)
        else:
            note = note_of(plan, field)
            assert (note.before, note.after, note.kind) == (None, value, "auto")
            assert f"set {field}" in note.reason


def test_chunk_buckets_that_hold_no_whole_prompt_are_refused():
    message = refusal(engine=EngineConfig(prefill_chunk_buckets=[64, 256], chunked_prefill_size=None))
    for part in ("prefill_chunk_buckets=[64, 256]", "the 4096 tokens", "bucket of at least 4096", "size=256"):
        assert part in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"decode_row_buckets": [4, 10**9], "max_running_requests": 4},
            ["decode_row_buckets", "10000000", "at most 64"],
        ),
        ({"prefill_chunk_buckets": [64, 10**9]}, ["prefill_chunk_buckets", "where 512 are needed", "at most 4096"]),
    ],
)
def test_a_bucket_that_nothing_comes_near_to_filling_is_refused(settings, words):
    """Found by use: the process was aborted in the compiler, without a Python error."""
    message = refusal(engine=EngineConfig(**settings))
    assert all(word in message for word in words), message
