"""The plan: automatic values first, the schedule last, and nothing without a note."""

import itertools
from typing import Any

import pytest

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.resolve import resolve
from jaxspec.sglang_flags import SGLANG_ENVIRONMENT
from tests.plans import ALL, V1, V2_OFF, draft_info, note_of, notes_of, plan_of, refusal, shape_of, target_info


def test_plain_decoding_is_a_path_of_one():
    plan = plan_of()
    assert (plan.algorithm, shape_of(plan), plan.path_len) == ("NONE", (0, 1, 1), 1)
    assert (plan.rounds_in_flight, plan.max_running_requests) == (1, 48)
    assert "the same as under speculation" in note_of(plan, "max_running_requests").reason


def test_plain_decoding_waits_when_told_and_heeds_no_variable_for_speculation():
    assert plan_of(engine=EngineConfig(disable_overlap_schedule=True)).rounds_in_flight == 0
    plan = plan_of(env=V2_OFF)
    note = note_of(plan, "JAXSPEC_ENABLE_SPEC_V2")
    assert (plan.rounds_in_flight, note.before, note.after, note.kind) == (1, "0", None, "warning")
    assert "set disable_overlap_schedule" in note.reason
    assert not notes_of(plan_of(env=V2_OFF, engine=V1), "JAXSPEC_ENABLE_SPEC_V2")
    assert plan_of(env={"SGLANG_ENABLE_SPEC_V2": "0"}) == plan_of()


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("overlap_trees", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_v1_has_the_first_reason_in_order_of_precedence(tree, overlap_trees, disabled, v2):
    numbers: dict[str, Any] = {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8} if tree else {"num_steps": 3}
    plan = plan_of(
        "EAGLE3",
        engine=EngineConfig(disable_overlap_schedule=disabled),
        env={} if v2 else V2_OFF,
        overlap_trees=overlap_trees,
        **numbers,
    )
    reasons = [
        (disabled, "disable_overlap_schedule is set"),
        (tree and not overlap_trees, "eagle_topk=4"),
        (not v2, "JAXSPEC_ENABLE_SPEC_V2=0"),
    ]
    expected = next((text for holds, text in reasons if holds), None)
    assert plan.rounds_in_flight == (1 if expected is None else 0)
    notes = notes_of(plan, "rounds_in_flight")
    assert len(notes) == plan.rounds_in_flight ^ 1
    for note in notes:
        assert (note.before, note.after) == (1, 0)
        assert expected is not None
        assert expected in note.reason
        # What the user asked for is no downgrade.
        assert note.kind == ("requested" if disabled or not v2 else "fallback")


@pytest.mark.parametrize(
    ("text", "v2"),
    [(text, True) for text in ("1", "true", "Yes", "ON", "", " 1 ")]
    + [(text, False) for text in ("0", "False", "no", "off")],
)
def test_the_variable_for_v2_is_yes_or_no(text, v2):
    assert plan_of("NGRAM", env={"JAXSPEC_ENABLE_SPEC_V2": text}).rounds_in_flight == int(v2)


@pytest.mark.parametrize("algorithm", ["NGRAM", None])
@pytest.mark.parametrize("text", ["2", "maybe", "v1", "-"])
def test_any_other_value_of_the_variable_is_an_error(algorithm, text):
    message = refusal(algorithm, env={"JAXSPEC_ENABLE_SPEC_V2": text})
    assert f"JAXSPEC_ENABLE_SPEC_V2={text!r} is neither yes nor no; set 1 for v2 or 0 for v1" in message


def test_rows_are_48_under_speculation_with_a_note_unless_told():
    plan = plan_of("NGRAM", strict=True)
    note = note_of(plan, "max_running_requests")
    assert (plan.max_running_requests, note.before, note.after, note.kind) == (48, None, 48, "auto")
    assert "set max_running_requests" in note.reason
    told = plan_of("NGRAM", engine=EngineConfig(max_running_requests=100))
    assert (told.max_running_requests, notes_of(told, "max_running_requests")) == (100, [])
    bucketed = plan_of("NGRAM", engine=EngineConfig(decode_row_buckets=[1, 8]))
    assert bucketed.max_running_requests == note_of(bucketed, "max_running_requests").after == 8


def test_dtype_is_automatic_with_a_note():
    plan = plan_of()
    assert (plan.dtype, note_of(plan, "dtype").before) == ("float32", "auto")
    told = plan_of(engine=EngineConfig(dtype="bfloat16"))
    assert (told.dtype, notes_of(told, "dtype")) == ("bfloat16", [])


def test_what_suits_the_device_is_noted_unless_told():
    plan = plan_of(scan_layers_default=True, compilation_cache_dir="folder")
    assert (plan.attention_backend, plan.scan_layers) == ("xla", True)
    for field, before, after in [
        ("attention_backend", "auto", "xla"),
        ("scan_layers", None, True),
        ("compilation_cache_dir", "auto", "folder"),
    ]:
        note = note_of(plan, field)
        assert (note.before, note.after, note.kind) == (before, after, "auto")
        assert f"set {field}" in note.reason
    engine = EngineConfig(attention_backend="xla", scan_layers=False, compilation_cache_dir="mine")
    told = plan_of(engine=engine, scan_layers_default=True, compilation_cache_dir="mine")
    assert not told.scan_layers
    assert not notes_of(told, "attention_backend", "scan_layers", "compilation_cache_dir")
    assert not notes_of(plan_of(compilation_cache_dir=None), "compilation_cache_dir")


def test_settings_without_effect_are_noted():
    assert note_of(plan_of("STANDALONE", ngram_max_match=7), "ngram_max_match").kind == "warning"
    assert not notes_of(plan_of("NGRAM", ngram_max_match=7), "ngram_max_match")
    chain = note_of(plan_of("NGRAM", overlap_trees=True), "overlap_trees")
    assert (chain.after, chain.kind) == (None, "warning")
    assert "chain" in chain.reason
    assert "v1 was chosen" in note_of(plan_of("EAGLE3", overlap_trees=True, engine=V1), "overlap_trees").reason
    assert not notes_of(plan_of("EAGLE3", overlap_trees=True), "overlap_trees")


@pytest.mark.parametrize("name", SGLANG_ENVIRONMENT)
def test_sglangs_variables_are_noted_and_not_read(name):
    plan = plan_of("NGRAM", env={name: "0"})
    note = note_of(plan, name)
    assert (note.before, note.after, note.kind) == ("0", None, "warning")
    assert SGLANG_ENVIRONMENT[name] in note.reason
    assert plan.rounds_in_flight == 1


NUMBERS = [
    {},
    {"num_steps": 2},
    {"eagle_topk": 1},
    {"num_draft_tokens": 6},
    {"num_steps": 4, "eagle_topk": 1, "num_draft_tokens": 9},
    {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8},
]
ENGINES = [
    {},
    {"disable_overlap_schedule": True},
    {"page_size": 10, "max_total_tokens": 101, "max_running_requests": 3},
    {"max_model_len": 64, "dtype": "float16", "rounds_per_dispatch": 4},
]
METHODS = ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"]
MATRIX = list(itertools.product(METHODS, NUMBERS, ENGINES, [False, True], [{}, V2_OFF]))


@pytest.mark.parametrize(("algorithm", "numbers", "engine", "overlap_trees", "env"), MATRIX)
def test_every_value_that_is_not_the_users_has_a_note(algorithm, numbers, engine, overlap_trees, env):
    spec = {"algorithm": algorithm, "overlap_trees": overlap_trees, **numbers}
    plan = plan_of(engine=EngineConfig(**engine), env=env, **spec)
    asked = {**vars(SpecConfig(**spec)), **vars(EngineConfig(**engine))}
    for field in (
        "num_steps",
        "eagle_topk",
        "num_draft_tokens",
        "max_running_requests",
        "page_size",
        "max_model_len",
        "decode_row_buckets",
        "prefill_chunk_buckets",
        "dtype",
        "attention_backend",
        "scan_layers",
    ):
        got = getattr(plan, field)
        notes = [(note.before, note.after) for note in notes_of(plan, field) if note.kind != "warning"]
        assert notes == ([] if got == asked[field] else [(asked[field], got)])
    assert len(notes_of(plan, "rounds_in_flight")) == (plan.rounds_in_flight == 0)
    assert plan.rounds_per_dispatch == asked["rounds_per_dispatch"]
    assert plan.num_pages * plan.page_size >= (asked["max_total_tokens"] or 0)
    # A tree never costs the overlap unless the user asked for the tree, or for v1.
    if plan.eagle_topk > 1 and not numbers and plan.rounds_in_flight == 0:
        assert engine.get("disable_overlap_schedule") or env == V2_OFF


@pytest.mark.parametrize(("algorithm", "numbers"), list(itertools.product(["EAGLE3", "STANDALONE"], NUMBERS)))
def test_a_plan_written_out_as_settings_resolves_to_itself_without_notes(algorithm, numbers):
    plan = plan_of(algorithm, overlap_trees=True, **numbers)
    again = plan_of(
        algorithm,
        num_steps=plan.num_steps,
        eagle_topk=plan.eagle_topk,
        num_draft_tokens=plan.num_draft_tokens,
        overlap_trees=plan.eagle_topk > 1,
        strict=True,
        engine=EngineConfig(
            max_running_requests=plan.max_running_requests,
            max_model_len=plan.max_model_len,
            page_size=plan.page_size,
            max_total_tokens=plan.page_size * plan.num_pages,
            chunked_prefill_size=plan.chunked_prefill_size,
            decode_row_buckets=plan.decode_row_buckets,
            prefill_chunk_buckets=plan.prefill_chunk_buckets,
            dtype=plan.dtype,
            attention_backend=plan.attention_backend,
            scan_layers=plan.scan_layers,
            compilation_cache_dir="cache",
        ),
    )
    assert again.notes == ()
    assert {**vars(again), "notes": None} == {**vars(plan), "notes": None}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 9}, ["[override] num_draft_tokens: 9 -> 4"]),
        (
            {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8},
            ["[fallback] rounds_in_flight: 1 -> 0", "eagle_topk=4", "overlap_trees=True"],
        ),
        ({"ngram_max_match": 8}, ["[warning] ngram_max_match: 8 -> None", "no effect"]),
        (
            {"engine": EngineConfig(page_size=16, max_total_tokens=100)},
            ["[override] max_total_tokens: 100 -> 112", "set max_total_tokens=112"],
        ),
        ({"draft": draft_info(max_position=8)}, ["[warning] draft_max_position=8"]),
        ({"env": {"SGLANG_ENABLE_SPEC_V2": "1"}}, ["[warning] SGLANG_ENABLE_SPEC_V2"]),
        (
            {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 9, "ngram_max_match": 8},
            ["2 of the plan's notes", "num_draft_tokens", "ngram_max_match"],
        ),
    ],
)
def test_strict_refuses_what_is_only_noted_otherwise(settings, parts):
    assert plan_of("EAGLE3", **settings).notes
    message = refusal("EAGLE3", strict=True, **settings)
    assert "strict=True refuses" in message
    for part in parts:
        assert part in message


def test_strict_allows_automatic_values_and_what_the_user_asked_for():
    assert plan_of("EAGLE3", strict=True).rounds_in_flight == 1
    assert plan_of("EAGLE3", strict=True, engine=V1).rounds_in_flight == 0
    assert plan_of("EAGLE3", strict=True, env=V2_OFF).rounds_in_flight == 0
    assert shape_of(plan_of("EAGLE3", strict=True, overlap_trees=True)) == (5, 4, 8)


def test_the_settings_resolve_themselves():
    spec, context = SpecConfig(algorithm="NGRAM"), {"available": ALL, "max_total_tokens_default": 4096}
    args = (EngineConfig(), target_info(), None, {})
    assert spec.resolve(*args, **context) == resolve(spec, *args, **context)


def test_noise_of_its_own_has_no_effect_on_a_lookup():
    assert note_of(plan_of("NGRAM", shared_noise=False), "shared_noise").kind == "warning"
    assert not notes_of(plan_of("STANDALONE", shared_noise=False), "shared_noise")
    assert not notes_of(plan_of("NGRAM"), "shared_noise")
