"""Which draft method runs, and which draft checkpoints it takes."""

from typing import Any

import pytest

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.resolve import resolve
from tests.plans import ALL, draft_info, note_of, notes_of, plan_of, refusal, shape_of, target_info


def test_unknown_algorithm_lists_the_known_ones():
    message = refusal("MEDUSA")
    for part in ("algorithm='MEDUSA' is not known", *ALL, "DFLASH", "in this version: EAGLE, EAGLE3, NEXTN, NGRAM"):
        assert part in message


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "UNO"])
def test_known_algorithm_that_is_not_in_this_version_is_named(algorithm):
    message = refusal(algorithm, available=("NGRAM", "STANDALONE"))
    assert f"algorithm={algorithm!r} is not in this version; set one of NGRAM, STANDALONE" in message


def test_any_available_algorithm_runs_as_a_chain():
    plan = plan_of("SCRIPTED", available=("SCRIPTED",))
    assert (plan.algorithm, shape_of(plan)) == ("SCRIPTED", (3, 1, 4))


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE", "EAGLE3"])
def test_methods_with_a_draft_model_name_its_flag(algorithm):
    message = refusal(algorithm, draft_model=None)
    assert f"algorithm={algorithm!r} needs a draft model" in message
    assert "draft_model (--speculative-draft-model-path)" in message


def test_ngram_refuses_a_draft_model():
    message = refusal("NGRAM", draft_model="some/draft")
    assert "draft_model='some/draft' has no use with algorithm='NGRAM'" in message
    assert "STANDALONE" in message


def test_nextn_is_eagle_with_the_targets_own_head():
    plan = plan_of("NEXTN", target=target_info(architecture="Qwen3NextForCausalLM", num_mtp_layers=1))
    assert (plan.algorithm, plan.draft_model, shape_of(plan)) == ("EAGLE", None, (3, 1, 4))
    note = note_of(plan, "algorithm")
    assert (note.before, note.after, note.kind) == ("NEXTN", "EAGLE", "auto")


def test_nextn_needs_the_head_and_no_other_draft():
    message = refusal("NEXTN")
    assert "algorithm='NEXTN'" in message
    assert "LlamaForCausalLM has num_mtp_layers=0" in message
    message = refusal("NEXTN", target=target_info(num_mtp_layers=1), draft_model="x")
    assert "draft_model='x' has no use with algorithm='NEXTN'" in message


def test_eagle_without_a_draft_model_uses_the_targets_own_head_where_that_runs():
    own = target_info(num_mtp_layers=1)
    plan = plan_of("EAGLE", target=own, draft_model=None, overlap_trees=True)
    assert (plan.algorithm, plan.draft_model, shape_of(plan)) == ("EAGLE", None, (3, 1, 4))
    assert "the target's own head" in note_of(plan, "draft_model").reason
    assert "needs a draft model" in refusal("EAGLE", target=own, draft_model=None, available=("EAGLE",))


def test_typical_acceptance_is_refused_by_name():
    message = refusal("NGRAM", accept_rule="typical")
    assert "accept_rule='typical' is not offered: it changes what the model would say" in message
    assert "'coupled'" in message
    assert "'target_only'" in message


TREE: dict[str, Any] = {"num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 4}


@pytest.mark.parametrize("form", [TREE, {"merge": "STANDALONE", "merge_draft_model": "draft"}])
def test_rejection_is_for_chains(form):
    message = refusal("NGRAM", accept_rule="rejection", overlap_trees=True, merge_draft=draft_info(), **form)
    assert "accept_rule='rejection' judges chains, and the draft is a tree; set eagle_topk=1" in message


def test_no_tree_is_automatic_under_rejection():
    assert plan_of("EAGLE3", overlap_trees=True).eagle_topk > 1
    assert plan_of("EAGLE3", accept_rule="rejection").eagle_topk == 1


def test_what_a_rule_does_to_the_output_is_said_in_the_plan():
    assert plan_of("NGRAM").exactness == "token"
    plan = plan_of("NGRAM", accept_rule="rejection", block_verification=True, strict=True)
    assert (plan.exactness, plan.block_verification) == ("law", True)
    assert "not the output of plain decoding token for token" in note_of(plan, "accept_rule").reason
    plan = plan_of("NGRAM", accept_rule="target_only", strict=True, overlap_trees=True, **TREE)
    assert (plan.exactness, plan.eagle_topk) == ("law", 2)
    plan = plan_of("NGRAM", accept_rule="target_only", accept_threshold_acc=0.9)
    assert plan.exactness == "lossy"
    assert note_of(plan, "accept_threshold_acc").reason.startswith("lossy")
    assert "accept_threshold_acc=0.9" in plan.describe()


def test_dp_attention_is_refused_with_standalone_first():
    engine = EngineConfig(enable_dp_attention=True)
    assert "STANDALONE" in refusal("STANDALONE", engine=engine)
    assert "enable_dp_attention=True" in refusal("STANDALONE", engine=engine)
    assert "enable_dp_attention=True is not in this version" in refusal("NGRAM", engine=engine)
    assert "enable_dp_attention=True is not in this version" in refusal(engine=engine)


def test_standalone_refuses_another_tokenizer():
    message = refusal("STANDALONE", draft=draft_info(tokenizer_hash="another"), draft_model="some/draft")
    for part in ("draft_model='some/draft'", "another tokenizer", "fingerprint another, not target", "NGRAM"):
        assert part in message


def test_vocabularies_of_one_tokenizer_may_differ_in_padding():
    note = note_of(plan_of("STANDALONE", draft=draft_info(vocab_size=1024), strict=True), "draft_vocab_size")
    assert (note.before, note.after, note.kind) == (1024, 1000, "auto")


@pytest.mark.parametrize(("skip", "kind"), [(False, "warning"), (True, "requested")])
def test_tokenizers_that_cannot_be_compared_are_noted(skip, kind):
    engine = EngineConfig(skip_tokenizer_init=skip)
    note = note_of(plan_of("STANDALONE", draft=draft_info(tokenizer_hash=None), engine=engine), "draft_tokenizer")
    assert note.kind == kind
    assert "could not be compared" in note.reason


def test_heads_need_no_tokenizer():
    plan = plan_of("EAGLE3", draft=draft_info(tokenizer_hash=None, vocab_size=320))
    assert not notes_of(plan, "draft_tokenizer", "draft_vocab_size")


@pytest.mark.parametrize(
    ("algorithm", "architecture", "wanted"),
    [
        ("EAGLE", "LlamaForCausalLMEagle3", "EAGLE3"),
        ("EAGLE3", "LlamaForCausalLMEagle", "EAGLE"),
        ("STANDALONE", "LlamaForCausalLMEagle3", "EAGLE3"),
    ],
)
def test_a_head_of_another_kind_is_refused_with_the_algorithm_to_set(algorithm, architecture, wanted):
    message = refusal(algorithm, draft=draft_info(architecture=architecture))
    assert architecture in message
    assert f"set algorithm='{wanted}'" in message
    assert plan_of(wanted, draft=draft_info(architecture=architecture)).algorithm == wanted


def test_a_draft_with_a_shorter_context_is_noted():
    draft = draft_info(max_position=2048)
    note = note_of(plan_of("STANDALONE", draft=draft), "draft_max_position")
    assert (note.after, note.kind) == (2048, "warning")
    assert "max_model_len=4096" in note.reason
    assert "set max_model_len=2048" in note.reason
    inside = plan_of("STANDALONE", draft=draft, engine=EngineConfig(max_model_len=2048))
    assert not notes_of(inside, "draft_max_position")


def test_a_draft_model_that_nobody_looked_into_is_an_error():
    with pytest.raises(ValueError, match="draft_model='x' is set, and nothing is known of it"):
        resolve(
            SpecConfig(algorithm="STANDALONE", draft_model="x"),
            EngineConfig(),
            target_info(),
            None,
            {},
            available=ALL,
            max_total_tokens_default=4096,
        )
