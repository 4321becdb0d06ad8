"""SGLang's speculative flags: each is mapped, passes at its default, or is refused by name."""

import pytest

from jaxspec.config import SpecConfig
from jaxspec.sglang_flags import MAPPED, REFUSED, THRESHOLDS, flag_of

# Every flag of SGLang's speculative section with a value that is not its default.
NOT_DEFAULT = {
    "draft_model_revision": "main",
    "draft_load_format": "dummy",
    "token_map": "hot.pt",
    "attention_mode": "decode",
    "draft_attention_backend": "triton",
    "dsa_topk_backend": "torch",
    "draft_kv_cache_dtype": "fp8_e4m3",
    "draft_window_size": 512,
    "draft_sink_size": 4,
    "moe_runner_backend": "triton",
    "moe_a2a_backend": "deepep",
    "draft_model_quantization": "fp8",
    "skip_dp_mlp_sync": True,
    "adaptive": True,
    "adaptive_config": "{}",
    "enable_multi_layer_eagle": True,
    "dflash_block_size": 16,
    "dspark_block_size": 7,
    "domino_candidate_pool_size": 1024,
    "ngram_min_bfs_breadth": 2,
    "ngram_max_bfs_breadth": 4,
    "ngram_match_type": "PROB",
    "ngram_max_trie_depth": 12,
    "ngram_branch_length": 12,
    "ngram_capacity": 1000,
    "ngram_external_corpus_path": "corpus.jsonl",
    "ngram_external_sam_budget": 8,
    "ngram_external_corpus_max_tokens": 5,
}


def test_mapped_flags_reach_their_fields():
    spec = SpecConfig.from_sglang(
        algorithm="standalone",
        draft_model_path="draft",
        num_steps=2,
        eagle_topk=1,
        num_draft_tokens=3,
        ngram_min_match_window_size=2,
        ngram_max_match_window_size=12,
    )
    assert spec == SpecConfig(
        algorithm="STANDALONE",
        draft_model="draft",
        num_steps=2,
        eagle_topk=1,
        num_draft_tokens=3,
        ngram_min_match=2,
        ngram_max_match=12,
    )


def test_the_prefix_and_own_fields_are_taken_too():
    spec = SpecConfig.from_sglang(
        speculative_algorithm="NGRAM", speculative_num_steps=2, strict=True, ngram_max_match=5
    )
    assert spec == SpecConfig(algorithm="NGRAM", num_steps=2, strict=True, ngram_max_match=5)


def test_the_table_of_refused_flags_is_the_one_tested():
    assert set(NOT_DEFAULT) == set(REFUSED)
    assert not set(REFUSED) & {*MAPPED}


@pytest.mark.parametrize(("name", "value"), NOT_DEFAULT.items())
def test_refused_flags_are_named_with_value_and_reason(name, value):
    with pytest.raises(ValueError, match="is refused") as error:
        SpecConfig.from_sglang(algorithm="NGRAM", **{name: value})
    message = str(error.value)
    assert message.startswith(f"{name}={value!r} ({flag_of(name)}) is refused: ")
    assert REFUSED[name].reason in message


@pytest.mark.parametrize(("name", "refused"), REFUSED.items())
def test_refused_flags_pass_at_their_defaults(name, refused):
    for default in (None, *refused.defaults):
        assert SpecConfig.from_sglang(algorithm="NGRAM", **{name: default}) == SpecConfig(algorithm="NGRAM")


@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_below_one_are_the_lossy_rule(name):
    for value in (None, 1.0):
        assert SpecConfig.from_sglang(algorithm="NGRAM", **{name: value}) == SpecConfig(algorithm="NGRAM")
    spec = SpecConfig.from_sglang(algorithm="NGRAM", **{name: 0.5})
    assert spec == SpecConfig(algorithm="NGRAM", accept_rule="target_only", **{name: 0.5})
    for threshold in (0.0, 1.1, -0.1):
        with pytest.raises(ValueError, match=rf"{name}={threshold} must be above 0 and at most 1"):
            SpecConfig.from_sglang(algorithm="NGRAM", **{name: threshold})
    with pytest.raises(TypeError, match=rf"{name}='1' must be a number"):
        SpecConfig.from_sglang(algorithm="NGRAM", **{name: "1"})


def test_the_flags_of_rejection_sampling_name_its_rule():
    for value in (None, False):
        assert SpecConfig.from_sglang(algorithm="NGRAM", use_rejection_sampling=value) == SpecConfig(algorithm="NGRAM")
    spec = SpecConfig.from_sglang(algorithm="NGRAM", use_rejection_sampling=True)
    assert spec == SpecConfig(algorithm="NGRAM", accept_rule="rejection")
    spec = SpecConfig.from_sglang(algorithm="NGRAM", use_block_verification=True)
    assert spec == SpecConfig(algorithm="NGRAM", accept_rule="rejection", block_verification=True)
    with pytest.raises(ValueError, match="use_rejection_sampling=True contradicts accept_rule='coupled'"):
        SpecConfig.from_sglang(algorithm="NGRAM", use_rejection_sampling=True, accept_rule="coupled")
    with pytest.raises(ValueError, match=r"accept_threshold_acc=0\.5 is lossy, and accept_rule='rejection' is not"):
        SpecConfig.from_sglang(algorithm="NGRAM", use_rejection_sampling=True, accept_threshold_acc=0.5)
    with pytest.raises(TypeError, match="use_rejection_sampling=1 must be True or False"):
        SpecConfig.from_sglang(algorithm="NGRAM", use_rejection_sampling=1)


@pytest.mark.parametrize("name", ["dspark_confidence_threshold", "ngram_external_other", "dflash_other"])
def test_flags_of_a_refused_family_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=3 .* is refused: "):
        SpecConfig.from_sglang(algorithm="NGRAM", **{name: 3})


@pytest.mark.parametrize("value", [None, 3])
def test_unknown_flags_are_named_whatever_their_value(value):
    with pytest.raises(ValueError, match=r"num_stpes is not a speculative flag .* num_steps"):
        SpecConfig.from_sglang(algorithm="NGRAM", num_stpes=value)


def test_two_names_of_one_field_must_agree():
    same = SpecConfig.from_sglang(algorithm="STANDALONE", draft_model="a", draft_model_path="a")
    assert same.draft_model == "a"
    with pytest.raises(ValueError, match="draft_model_path='b' contradicts draft_model='a'"):
        SpecConfig.from_sglang(algorithm="STANDALONE", draft_model="a", draft_model_path="b")


@pytest.mark.parametrize("flags", [{}, {"algorithm": None}, {"num_steps": 3}])
def test_the_algorithm_is_needed(flags):
    with pytest.raises(ValueError, match=r"algorithm is missing; set it \(--speculative-algorithm\)"):
        SpecConfig.from_sglang(**flags)


def test_flags_have_sglangs_spelling():
    assert flag_of("num_draft_tokens") == "--speculative-num-draft-tokens"
    assert flag_of("enable_multi_layer_eagle") == "--enable-multi-layer-eagle"
