"""Model configs: both wordings mean the same, and what the decoder cannot do is refused by name."""

import json
import math

import pytest

from jaxspec.models.config import KNOWN_ARCHITECTURES, ModelConfig, RopeConfig
from tests.loading.files import hf_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "smollm2",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma3",
        "deepseek_v3",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
    ],
)
def test_both_wordings_of_the_reference_models_mean_the_same(shared, family):
    folder = shared / "oracle" / "tiny" / family
    configs = [json.loads((folder / name).read_text()) for name in ("config.json", "config_hub.json")]
    saved, public = map(ModelConfig.from_hf, configs)
    assert saved == public
    assert hash(saved) == hash(public)


@pytest.mark.parametrize(
    ("public", "saved"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default"}),
        ({"rope_scaling": None}, {"rope_type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_public_and_saved_rope_wordings_mean_the_same(public, saved):
    config = hf_config(**{"rope_theta": 5e5, **public})
    other = hf_config(rope_parameters={"rope_theta": 5e5, **saved})
    del other["rope_theta"]
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(other)


def test_rope_fields_are_read():
    rope = ModelConfig.from_hf(hf_config(rope_scaling={"rope_type": "llama3", **LLAMA3})).rope
    assert rope == RopeConfig(kind="llama3", factor=8.0, original_max_position=64)
    said = {"type": "yarn", "factor": 4, "beta_fast": 16, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}
    rope = ModelConfig.from_hf(hf_config(rope_scaling=said)).rope
    assert rope == RopeConfig(
        kind="yarn",
        factor=4.0,
        original_max_position=512,
        beta_fast=16.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        truncate=False,
    )


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths():
    scaling = {"type": "yarn", "factor": None, "original_max_position_embeddings": 128}
    assert ModelConfig.from_hf(hf_config(rope_scaling=scaling)).rope.factor == 4.0


def test_cos_sin_scale_is_given_derived_or_one():
    yarn = {"kind": "yarn", "factor": 4.0, "original_max_position": 64}
    plain = 0.1 * math.log(4.0) + 1
    assert RopeConfig(kind="linear", factor=4.0).cos_sin_scale == 1.0
    assert RopeConfig(**yarn).cos_sin_scale == pytest.approx(plain)
    assert RopeConfig(**yarn, attention_factor=1.5).cos_sin_scale == 1.5
    assert RopeConfig(**yarn, mscale=1.0, mscale_all_dim=1.0).cos_sin_scale == 1.0
    ratio = plain / (0.05 * math.log(4.0) + 1)
    assert RopeConfig(**yarn, mscale=1.0, mscale_all_dim=0.5).cos_sin_scale == pytest.approx(ratio)
    # One of the two alone does not count.
    assert RopeConfig(**yarn, mscale=2.0).cos_sin_scale == pytest.approx(plain)


@pytest.mark.parametrize(
    ("family", "changes", "flags"),
    [
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_follow_the_family(family, changes, flags):
    config = ModelConfig.from_hf(hf_config(family, **changes))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == flags


def test_what_a_config_leaves_out_has_the_family_default():
    said = hf_config()
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act"):
        del said[name]
    config = ModelConfig.from_hf(said)
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps, config.rope.theta) == (8, 4, 1e-6, 10000.0)
    assert not config.tie_embeddings
    qwen3 = hf_config("qwen3", head_dim=None)
    assert ModelConfig.from_hf(qwen3).head_dim == 128


def test_the_model_type_stands_in_for_the_architecture():
    said = hf_config("qwen2")
    del said["architectures"]
    assert ModelConfig.from_hf(said).architecture == "Qwen2ForCausalLM"


def test_a_wrapped_text_config_is_unwrapped_with_the_wrapper_tie_flag():
    inner = hf_config("qwen3")
    del inner["architectures"], inner["tie_word_embeddings"]
    wrapped = {"architectures": ["SomeVisionModel"], "tie_word_embeddings": True, "text_config": inner}
    plain = hf_config("qwen3", tie_word_embeddings=True)
    assert ModelConfig.from_hf(wrapped) == ModelConfig.from_hf(plain)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "'FalconForCausalLM' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size='32'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"num_hidden_layers": 0}, "num_layers=0"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"num_hidden_layers": 10**9}, "num_layers=1000000000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; expected true or false"),
        ({"attention_bias": 1}, "attention_bias=1; expected true or false"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'; expected a list"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; expected an object"),
        ({"rope_parameters": 3}, "rope_parameters=3; expected an object"),
        ({"rope_scaling": {"type": 3}}, "type=3; expected a string"),
        ({"rope_scaling": {"type": "yarn", "truncate": "false"}}, "truncate='false'; expected true or false"),
        (
            {"rope_scaling": {"type": "yarn"}, "original_max_position_embeddings": "x"},
            "original_max_position_embeddings='x'; expected a whole number",
        ),
        ({"model_type": {}}, "model_type={}; expected a string"),
        ({"layer_types": 3}, "layer_types=3; expected a list of names"),
        ({"text_config": "x"}, "text_config='x'; expected an object"),
        ({"vocab_size": 10**400}, "expected a whole number"),
        ({"use_sliding_window": "false"}, "use_sliding_window='false'; expected true or false"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig.from_hf(hf_config(**changes))


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ValueError, match=", ".join(KNOWN_ARCHITECTURES)):
        ModelConfig.from_hf({"model_type": "mystery"})


def test_a_sliding_window_that_is_off_is_ignored():
    config = hf_config("qwen2", use_sliding_window=False, sliding_window=4096)
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(hf_config("qwen2"))


def test_known_architectures_are_the_models_that_exist():
    from jaxspec.models import MODELS

    assert set(KNOWN_ARCHITECTURES) == set(MODELS)
