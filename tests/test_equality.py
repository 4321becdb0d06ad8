"""The equality matrix: whatever drafts, and however it is scheduled, the tokens are those of plain decoding.

Drafts x schedules x page sizes x whole and chunked prompts; in each, requests alone, greedy and sampled ones apart and
together in three rows, with mixed lengths, budgets, stop tokens and min_tokens, undisturbed and preempted.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxspec.draft.standalone import Standalone
from jaxspec.engine import Engine
from jaxspec.metrics import Emission, RoundStats
from jaxspec.request import Request
from tests.cases import (
    DRAFTS,
    HEADS,
    MAX_LEN,
    NUM_CASES,
    SCHEDULES,
    SCRIPT,
    SCRIPTED,
    TREES,
    cases,
    engine_of,
    follow,
    plain,
    play,
    target,
    truth,
)
from tests.dense import dense_logits
from tests.scripted import Scripted, expected_emissions, script_leaves
from tests.tiny import VOCAB, chain, make_engine, tiny_model

PAGE_SIZES = (1, 16, 64)
CHUNK = 7  # no multiple of it is a multiple of a page
EVERY = list(range(NUM_CASES))
# Long requests first: they fit into the small pool when they start and not when they end.
CROWD = sorted(EVERY, key=lambda index: index not in (3, 4, 11, 12))
# Buckets that leave one prefill and one decode to compile.
ONE_SHAPE: dict[str, Any] = {
    "chunked_prefill_size": None,
    "prefill_chunk_buckets": (MAX_LEN,),
    "decode_row_buckets": (4,),
}
TREE_PAGE_SIZE = 1  # every path crosses pages, and there is one bucket of rows
SMALL_POOL = {1: 110, 16: 8, 64: 3}


def engine_for(draft: str, schedule: str, page_size: int = 16, chunk: int | None = None, *, small=False) -> Engine:
    pool_pages = SMALL_POOL[page_size] if small else None
    engine = engine_of(draft, schedule, page_size=page_size, chunk=chunk, pool_pages=pool_pages)
    if draft in SCRIPTED:
        follow(engine, truth(), SCRIPT)
    return engine


def check_plays(engine: Engine, indices: Sequence[int]) -> list[Request]:
    """Runs cases together and compares them with plain decoding."""
    requests = play(engine, [cases()[index] for index in indices])
    for index, request in zip(indices, requests, strict=True):
        expected = plain()[index]
        assert request.output_ids == expected.output_ids, f"case {index}, {cases()[index]}"
        assert request.finish_reason == expected.finish_reason
        assert request.stop_reason == expected.stop_reason
    return requests


@functools.cache
def pace(draft: str, page_size: int = 16) -> tuple[list[Emission], ...]:
    """What each step of each case emits, accepts and proposes: by the script, else as measured once, in v1."""
    if draft in SCRIPTED:
        return tuple(expected_emissions(SCRIPTED[draft], SCRIPT, request) for request in plain())
    return tuple(request.emissions for request in check_plays(engine_for(draft, "v1", page_size), EVERY))


def stats_of(draft: str, page_size: int = 16) -> RoundStats:
    return RoundStats.of(emission for emissions in pace(draft, page_size) for emission in emissions)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", [None, CHUNK], ids=["whole", "chunked"])
class TestMatrix:
    """Tokens equal plain decoding; undisturbed, each round's counts are the draft's, whatever the schedule."""

    @pytest.mark.parametrize("index", [2, 12])
    def test_alone(self, draft, page_size, schedule, chunk, index):
        (request,) = check_plays(engine_for(draft, schedule, page_size, chunk), [index])
        assert request.emissions == pace(draft)[index]

    @pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
    def test_in_three_rows(self, draft, page_size, schedule, chunk, greedy):
        indices = [index for index in EVERY if (cases()[index].params.temperature == 0) == greedy]
        engine = engine_for(draft, schedule, page_size, chunk)
        requests = check_plays(engine, indices)
        assert len(requests) == 8
        assert engine.metrics.preemptions == 0
        assert [request.emissions for request in requests] == [pace(draft)[index] for index in indices]

    def test_mixed_and_preempted(self, draft, page_size, schedule, chunk):
        """Public report: after a scheduling gap, drafts of another order are verified (vLLM PR #46899)."""
        engine = engine_for(draft, schedule, page_size, chunk, small=True)
        check_plays(engine, CROWD)
        assert engine.metrics.preemptions > 0
        assert engine.num_free_pages == SMALL_POOL[page_size]


# v1 and v2 are one program, and several rounds a dispatch another.
TREE_RUNS = [(draft, schedule) for draft in TREES for schedule in ("v1", "v2")]
TREE_RUNS += [("eagle3-5-4-8", "r4")]


@pytest.mark.parametrize(("draft", "schedule"), TREE_RUNS)
class TestTrees:
    """The same for what grows trees, on pages of one token and with prompts in chunks; `pace` takes them in whole."""

    @pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
    def test_in_three_rows(self, draft, schedule, greedy):
        indices = [index for index in EVERY if (cases()[index].params.temperature == 0) == greedy]
        engine = engine_for(draft, schedule, TREE_PAGE_SIZE, CHUNK)
        requests = check_plays(engine, indices)
        assert engine.metrics.accepted > 0
        assert [request.emissions for request in requests] == [pace(draft, TREE_PAGE_SIZE)[index] for index in indices]

    def test_mixed_and_preempted(self, draft, schedule):
        engine = engine_for(draft, schedule, TREE_PAGE_SIZE, CHUNK, small=True)
        check_plays(engine, CROWD)
        assert engine.metrics.preemptions > 0
        assert engine.num_free_pages == SMALL_POOL[TREE_PAGE_SIZE]


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize("small", [False, True], ids=["roomy", "crowded"])
def test_plain_decoding_does_not_depend_on_the_schedule_either(schedule, small):
    check_plays(engine_for("plain", schedule, chunk=CHUNK, small=small), CROWD)


def test_plain_greedy_decoding_is_the_argmax_of_a_dense_forward():
    checked = 0
    for case, request in zip(cases(), plain()):
        if case.params.temperature > 0:
            continue
        logits = dense_logits(target(), request.sequence)[len(case.prompt) - 1 : -1]
        logits[: case.params.min_tokens, list(request.stop_ids)] = -np.inf
        assert request.output_ids == logits.argmax(axis=-1).tolist()
        checked += len(request.output_ids)
    assert checked > 150


def test_the_cases_reach_every_ending():
    """The matrix would prove less if no case stopped, ran out, or had a stop token banned at first."""
    assert {request.finish_reason for request in plain()} == {"stop", "length"}
    assert any(case.params.min_tokens > 0 for case in cases())
    assert {len(request.output_ids) for request in plain()} >= {1, 88}


def test_an_identical_draft_is_accepted_whole():
    """Public report: the draft's cache is trimmed at the wrong place, or keeps a hole (mlxcel #994)."""
    stats = stats_of("identical")
    assert stats.accepted == stats.proposed > 0


def test_a_good_draft_is_accepted_in_part_and_a_bad_one_seldom():
    good, bad = stats_of("good").accept_rate, stats_of("bad").accept_rate
    assert good is not None
    assert bad is not None
    assert bad < 0.15 < 0.4 < good < 1


def test_a_tree_of_a_sure_draft_is_accepted_in_part():
    """At every length: the matrix is to see each branch taken."""
    accepted = {emission.accepted for emissions in pace("sure-5-4-8", TREE_PAGE_SIZE) for emission in emissions}
    assert accepted >= {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("draft", HEADS)
def test_a_random_head_is_accepted_seldom(draft):
    stats = stats_of(f"{draft}-3-1-4", TREE_PAGE_SIZE)
    assert 0 < stats.accepted < stats.proposed / 2


def test_prompt_lookup_finds_something():
    stats = stats_of("ngram")
    assert 0 < stats.accepted < stats.proposed


@pytest.mark.parametrize("draft", DRAFTS)
def test_v1_and_v2_report_the_same_totals(draft):
    totals = []
    for schedule in SCHEDULES:
        engine = engine_for(draft, schedule)
        check_plays(engine, EVERY)
        totals.append(engine.metrics.stats)
    assert totals[0] == totals[1] == totals[2] == stats_of(draft)


def test_a_tree_of_more_nodes_than_a_word_has_bits():
    method = Scripted(num_steps=12, is_chain=False)
    script = (12, 5, 0, 9)
    assert method.num_draft_tokens > 32
    leaves = script_leaves(truth(), script, max_len=MAX_LEN, num_sequences=NUM_CASES)
    engine = make_engine(target(), method, leaves, max_model_len=MAX_LEN, **ONE_SHAPE)
    requests = check_plays(engine, EVERY)
    assert [r.emissions for r in requests] == [expected_emissions(method, script, r) for r in requests]


@pytest.mark.parametrize("vocab", [VOCAB - 5, VOCAB + 3], ids=["narrower", "wider"])
def test_a_draft_with_another_vocabulary_tail(vocab):
    """One step, so that the draft's first proposal is its only one. Public report: padded vocabularies (vLLM #7252)."""
    network, leaves = tiny_model(1, vocab_size=vocab)
    method = Standalone(network, chain(1), VOCAB)
    engine = make_engine(target(), method, leaves, max_model_len=MAX_LEN, **ONE_SHAPE)
    check_plays(engine, EVERY)
    assert engine.metrics.proposed > 0
