"""The three numbers of a draft tree: automatic, filled, forced, or refused with the name of the flag."""

import itertools
from typing import Any

import pytest

from jaxspec.config import EngineConfig
from tests.plans import V1, V2_OFF, draft_info, note_of, notes_of, plan_of, refusal, shape_of, target_info


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize(
    ("settings", "shape", "rounds_in_flight"),
    [
        ({}, (3, 1, 4), 1),
        ({"overlap_trees": True}, (5, 4, 8), 1),
        ({"engine": V1}, (5, 4, 8), 0),
        ({"env": V2_OFF}, (5, 4, 8), 0),
        ({"overlap_trees": True, "target": target_info(architecture="Qwen3ForCausalLM")}, (3, 1, 4), 1),
        ({"engine": V1, "target": target_info(architecture="Qwen3ForCausalLM")}, (3, 1, 4), 0),
    ],
)
def test_automatic_tree_on_llama_only_where_it_costs_no_overlap(algorithm, settings, shape, rounds_in_flight):
    plan = plan_of(algorithm, **settings)
    assert (shape_of(plan), plan.rounds_in_flight) == (shape, rounds_in_flight)
    assert not [note for note in plan.notes if note.kind == "fallback"]


def test_an_automatic_chain_says_how_to_have_the_tree():
    assert "overlap_trees=True" in note_of(plan_of("EAGLE3"), "num_steps").reason


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM"])
@pytest.mark.parametrize("engine", [EngineConfig(), V1])
def test_other_methods_draft_a_chain_automatically(algorithm, engine):
    assert shape_of(plan_of(algorithm, engine=engine, overlap_trees=True)) == (3, 1, 4)


@pytest.mark.parametrize(
    ("given", "shape", "filled"),
    [
        ({"num_steps": 5}, (5, 1, 6), {"eagle_topk", "num_draft_tokens"}),
        ({"num_draft_tokens": 8}, (7, 1, 8), {"eagle_topk", "num_steps"}),
        ({"eagle_topk": 1}, (3, 1, 4), {"num_steps", "num_draft_tokens"}),
        ({"num_steps": 2, "eagle_topk": 1}, (2, 1, 3), {"num_draft_tokens"}),
        ({"eagle_topk": 1, "num_draft_tokens": 2}, (1, 1, 2), {"num_steps"}),
        ({"num_steps": 4, "num_draft_tokens": 5}, (4, 1, 5), {"eagle_topk"}),
        ({"num_steps": 4, "eagle_topk": 1, "num_draft_tokens": 5}, (4, 1, 5), set()),
        ({"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 8}, (5, 4, 8), set()),
    ],
)
def test_numbers_left_open_are_filled_with_notes(given, shape, filled):
    plan = plan_of("EAGLE3", overlap_trees=shape[1] > 1, strict=True, **given)
    assert shape_of(plan) == shape
    notes = notes_of(plan, "num_steps", "eagle_topk", "num_draft_tokens")
    assert {note.field for note in notes} == filled
    assert {note.kind for note in notes} <= {"auto"}


@pytest.mark.parametrize("given", [{}, {"eagle_topk": 1}])
@pytest.mark.parametrize(("max_model_len", "num_steps"), [(2, 1), (3, 2), (4, 3), (5, 3)])
def test_an_automatic_chain_is_as_long_as_a_short_context_holds(given, max_model_len, num_steps):
    plan = plan_of("NGRAM", engine=EngineConfig(max_model_len=max_model_len), **given)
    assert shape_of(plan) == (num_steps, 1, num_steps + 1)
    note = note_of(plan, "num_steps")
    assert (note.before, note.after, note.kind) == (None, num_steps, "auto")
    assert (f"max_model_len={max_model_len}" in note.reason) == (num_steps < 3)


def test_an_automatic_tree_gives_way_to_a_chain_in_a_short_context():
    tree = {"overlap_trees": True, "engine": EngineConfig(max_model_len=6)}
    assert shape_of(plan_of("EAGLE3", **tree)) == (5, 4, 8)
    assert shape_of(plan_of("EAGLE3", **{**tree, "engine": EngineConfig(max_model_len=5)})) == (3, 1, 4)


@pytest.mark.parametrize("num_draft_tokens", [2, 3, 5, 64])
def test_a_chain_forces_its_width_with_a_note(num_draft_tokens):
    plan = plan_of("NGRAM", num_steps=3, eagle_topk=1, num_draft_tokens=num_draft_tokens)
    assert shape_of(plan) == (3, 1, 4)
    note = note_of(plan, "num_draft_tokens")
    assert (note.before, note.after, note.kind) == (num_draft_tokens, 4, "override")
    assert "eagle_topk=1" in note.reason


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"eagle_topk": 4}, ["eagle_topk=4", "--speculative-num-steps", "--speculative-num-draft-tokens"]),
        ({"eagle_topk": 4, "num_steps": 5}, ["eagle_topk=4", "num_draft_tokens (--speculative-num-draft-tokens)"]),
        ({"eagle_topk": 4, "num_draft_tokens": 8}, ["eagle_topk=4", "num_steps (--speculative-num-steps)"]),
        (
            {"num_steps": 5, "num_draft_tokens": 8},
            ["num_steps=5", "num_draft_tokens=8", "eagle_topk (--speculative-eagle-topk)", "num_draft_tokens=6"],
        ),
        ({"num_steps": 5, "num_draft_tokens": 4}, ["num_draft_tokens=4", "num_steps=5", "at least 6"]),
        (
            {"num_steps": 5, "eagle_topk": 4, "num_draft_tokens": 5},
            ["num_draft_tokens=5", "num_steps=5", "at least 6"],
        ),
        (
            {"num_steps": 1, "eagle_topk": 4, "num_draft_tokens": 6},
            ["num_draft_tokens=6", "the 5 nodes", "at most 5"],
        ),
        (
            {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 12},
            ["num_draft_tokens=12", "the 11 nodes", "at most 11"],
        ),
        (
            {"num_steps": 512, "engine": EngineConfig(max_model_len=512)},
            ["num_steps=512", "max_model_len=512", "at most 511"],
        ),
    ],
)
def test_numbers_that_make_no_tree_are_refused(given, parts):
    message = refusal("EAGLE3", overlap_trees=True, **given)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("algorithm", "infos", "most"),
    [
        ("EAGLE3", {"draft": draft_info(draft_vocab=6)}, 6),
        ("EAGLE", {"target": target_info(vocab_size=8), "draft": draft_info(vocab_size=8)}, 8),
        ("STANDALONE", {"target": target_info(vocab_size=9), "draft": draft_info(vocab_size=12)}, 9),
        ("STANDALONE", {"target": target_info(vocab_size=12), "draft": draft_info(vocab_size=9)}, 9),
    ],
)
@pytest.mark.parametrize("merge", [{}, {"merge": "NGRAM"}])
def test_a_node_has_no_more_children_than_the_draft_has_tokens(algorithm, infos, most, merge):
    tree: dict[str, Any] = {
        "num_steps": 1,
        "num_draft_tokens": 3,
        **({"merge_num_steps": 1} if merge else {}),
        **merge,
        **infos,
    }
    assert plan_of(algorithm, eagle_topk=most, **tree).eagle_topk == most
    said = refusal(algorithm, eagle_topk=most + 1, **tree)
    assert f"eagle_topk={most + 1}" in said
    assert f"at most {most}" in said
    assert plan_of(algorithm, static_tree=[[most - 1]], **merge, **infos).eagle_topk == most
    said = refusal(algorithm, static_tree=[[most]], **merge, **infos)
    assert f"static_tree has rank {most}" in said
    assert f"from 0 to {most - 1}" in said


def test_a_lookup_takes_any_number_of_matches():
    tree: dict[str, Any] = {"num_steps": 1, "eagle_topk": 20, "num_draft_tokens": 3}
    assert plan_of("NGRAM", target=target_info(vocab_size=8), **tree).eagle_topk == 20


@pytest.mark.parametrize("given", [{"num_steps": 1024}, {"num_draft_tokens": 1025}])
def test_the_longest_chain_is_accepted(given):
    assert shape_of(plan_of("NGRAM", **given)) == (1024, 1, 1025)


@pytest.mark.parametrize(("num_steps", "eagle_topk"), list(itertools.product([1, 2, 5], [2, 3, 8])))
def test_the_largest_tree_is_accepted_and_one_node_more_is_not(num_steps, eagle_topk):
    # Depth 1 has topk nodes; every level below scores topk children of each of topk kept nodes; the root is one.
    levels = [eagle_topk, *[eagle_topk * eagle_topk] * (num_steps - 1)]
    given = {"num_steps": num_steps, "eagle_topk": eagle_topk, "overlap_trees": True}
    assert plan_of("EAGLE", num_draft_tokens=sum(levels) + 1, **given).num_draft_tokens == sum(levels) + 1
    assert f"at most {sum(levels) + 1}" in refusal("EAGLE", num_draft_tokens=sum(levels) + 2, **given)
