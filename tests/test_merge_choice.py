"""Merged trees in the plan: the second method, its chain, the nodes that both share, and the schedule."""

import pytest

from jaxspec.config import EngineConfig, SpecConfig
from tests.plans import draft_info, note_of, notes_of, plan_of, refusal, shape_of


def test_a_chain_and_a_lookup_share_a_tree_that_holds_both():
    plan = plan_of("EAGLE3", merge="ngram", num_steps=5, overlap_trees=True)
    assert (plan.merge, plan.merge_draft_model, plan.merge_num_steps) == ("NGRAM", None, 7)
    assert (shape_of(plan), plan.path_len, plan.rounds_in_flight) == ((5, 1, 13), 8, 1)
    assert note_of(plan, "num_draft_tokens").after == 13
    assert note_of(plan, "merge_num_steps").after == 7


def test_a_merged_tree_runs_on_v1_unless_told():
    plan = plan_of("EAGLE3", merge="NGRAM")
    assert plan.rounds_in_flight == 0
    assert "merge='NGRAM'" in note_of(plan, "rounds_in_flight").reason
    assert shape_of(plan)[:2] == (3, 1)  # no tree is chosen where one comes of merging


def test_fewer_nodes_are_the_users_choice():
    plan = plan_of("EAGLE3", merge="NGRAM", num_steps=3, merge_num_steps=4, num_draft_tokens=6)
    assert shape_of(plan) == (3, 1, 6)
    assert not notes_of(plan, "num_draft_tokens", "merge_num_steps")
    assert "from 5 to 8" in refusal("EAGLE3", merge="NGRAM", num_steps=3, merge_num_steps=4, num_draft_tokens=4)
    assert "from 5 to 8" in refusal("EAGLE3", merge="NGRAM", num_steps=3, merge_num_steps=4, num_draft_tokens=9)


def test_a_tree_may_be_merged_too():
    plan = plan_of("EAGLE", merge="NGRAM", num_steps=3, eagle_topk=2, num_draft_tokens=9)
    assert (shape_of(plan), plan.path_len) == ((3, 2, 9), 8)
    static = plan_of("EAGLE", merge="NGRAM", static_tree=[[0], [1]], merge_num_steps=2)
    assert shape_of(static) == (1, 2, 5)


LARGEST = [[rank] for rank in range(1000)] + [[0] * (depth + 2) for depth in range(24)]


@pytest.mark.parametrize(
    ("given", "merge_num_steps", "least", "most"),
    [
        ({"num_steps": 2, "eagle_topk": 2}, 5, 6, 12),
        ({"num_steps": 2, "eagle_topk": 2}, 1, 3, 8),
        ({"num_steps": 3, "eagle_topk": 1}, 4, 5, 8),
        ({"num_steps": 40, "eagle_topk": 64}, 3, 41, 1025),
        ({"static_tree": [[0], [1]]}, 2, 3, 5),
        ({"static_tree": [[0], [1]], "eagle_topk": 2}, 1, 2, 4),
        ({"static_tree": LARGEST}, 7, 26, 1025),
    ],
)
def test_the_nodes_of_both_have_one_lower_and_one_upper_bound(given, merge_num_steps, least, most):
    settings = {"merge": "NGRAM", "merge_num_steps": merge_num_steps, **given}
    draft = draft_info(vocab_size=2000)
    for nodes in (least, most):
        plan = plan_of("EAGLE", draft=draft, num_draft_tokens=nodes, **settings)
        assert plan.num_draft_tokens == nodes
        assert not notes_of(plan, "num_draft_tokens")
    for nodes in {max(least - 1, 2), min(most + 1, 1025)} - {least, most}:
        assert f"from {least} to {most}" in refusal("EAGLE", draft=draft, num_draft_tokens=nodes, **settings)


def test_the_automatic_number_of_nodes_is_a_legal_one():
    plan = plan_of("EAGLE", merge="NGRAM", static_tree=LARGEST)
    assert plan.num_draft_tokens == note_of(plan, "num_draft_tokens").after == 1025


def test_the_second_methods_checkpoint_is_checked_as_the_firsts():
    assert "set merge_draft_model" in refusal("EAGLE3", merge="STANDALONE")
    words = refusal(
        "EAGLE3", merge="STANDALONE", merge_draft_model="other", merge_draft=draft_info(tokenizer_hash="another")
    )
    assert "another tokenizer" in words
    plan = plan_of("EAGLE3", merge="STANDALONE", merge_draft_model="other", merge_draft=draft_info())
    assert (plan.merge, plan.merge_draft_model) == ("STANDALONE", "other")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"merge": "FOO"}, ["merge='FOO' is not known"]),
        ({"merge": "DFLASH"}, ["merge='DFLASH' is not in this version"]),
        ({"merge": "NGRAM", "merge_draft_model": "d"}, ["merge_draft_model='d' has no use with merge='NGRAM'"]),
        ({"merge": "NEXTN"}, ["merge='NEXTN' needs a target", "with a merge_draft_model"]),
        (
            {
                "merge": "EAGLE",
                "merge_draft_model": "d",
                "merge_draft": draft_info(architecture="LlamaForCausalLMEagle3"),
            },
            ["merge_draft_model='d' is a", "merge='EAGLE' does not draft with", "set merge='EAGLE3'"],
        ),
        (
            {"merge": "STANDALONE", "merge_draft_model": "d", "merge_draft": draft_info(tokenizer_hash="another")},
            ["merge_draft_model='d' has another tokenizer", "set a merge_draft_model", "or merge='NGRAM'"],
        ),
        ({"merge": "STANDALONE", "merge_draft_model": "d"}, ["merge_draft_model='d' is set, and nothing is known"]),
    ],
)
def test_what_is_wrong_with_the_second_method_is_said_in_its_settings(settings, said):
    words = refusal("EAGLE3", **settings)
    assert all(part in words for part in said), words
    assert " algorithm=" not in words
    assert " draft_model=" not in words


@pytest.mark.parametrize("merge", ["NGRAM", "ngram"])
def test_a_method_does_not_merge_with_itself(merge):
    assert "adds nothing" in refusal("NGRAM", merge=merge)


def test_what_is_unknown_or_alone_is_refused():
    assert refusal("EAGLE3", merge="MEDUSA").startswith("merge='MEDUSA' is not known")
    with pytest.raises(ValueError, match="merge_num_steps=3 needs merge"):
        SpecConfig(algorithm="NGRAM", merge_num_steps=3)
    with pytest.raises(ValueError, match="merge_draft_model='x' needs merge"):
        SpecConfig(algorithm="NGRAM", merge_draft_model="x")
    with pytest.raises(TypeError, match="merge=3 must be a string"):
        plan_of("NGRAM", merge=3)
    with pytest.raises(ValueError, match="merge='none' names no draft method"):
        SpecConfig(algorithm="NGRAM", merge="none")


def test_the_chain_fits_the_context():
    assert plan_of("EAGLE3", merge="NGRAM", engine=EngineConfig(max_model_len=6)).merge_num_steps == 5
    words = refusal("EAGLE3", merge="NGRAM", merge_num_steps=6, engine=EngineConfig(max_model_len=6))
    assert "at most 5" in words


def test_lookup_settings_have_an_effect_where_the_lookup_is_merged_in():
    assert not notes_of(plan_of("EAGLE3", merge="NGRAM", ngram_max_match=5), "ngram_max_match")
    assert notes_of(plan_of("EAGLE3", ngram_max_match=5), "ngram_max_match")
