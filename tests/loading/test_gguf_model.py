"""GGUF models in Hugging Face's words: names, row order, config, rope scaling, stop ids."""

import numpy as np
import pytest

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.gguf_file import GGUFFile
from jaxspec.models.config import ModelConfig
from tests.loading.files import hf_config, random_tensors, write_gguf

FAMILIES = ("llama", "qwen2", "qwen3")


def read_config(tmp_path, config, **changes) -> ModelConfig:
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(config), **changes)
    return ModelConfig.from_hf(open_checkpoint(path).config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_reads_as_the_model_it_was_written_from(tmp_path, family, tied):
    config = hf_config(family, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert ModelConfig.from_hf(checkpoint.config) == ModelConfig.from_hf(config)
    assert checkpoint.shapes == {name: values.shape for name, values in tensors.items()}
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_llama_biases_are_put_in_order_too(tmp_path):
    config = hf_config(attention_bias=True)
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert ModelConfig.from_hf(checkpoint.config) == ModelConfig.from_hf(config)
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_rotary_pairs_become_halves(tmp_path):
    config = hf_config(num_attention_heads=2, num_key_value_heads=1, head_dim=6, num_hidden_layers=1)
    tensors = random_tensors(config)
    # What the file holds for head 0 and head 1, by hand: pairs (0, 3), (1, 4), (2, 5) side by side.
    stored = [0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15]
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15], np.float32)
    tensors[name] = np.repeat(rows[:, None], 32, axis=1)
    path = write_gguf(tmp_path / "x.gguf", config, tensors)
    np.testing.assert_array_equal(GGUFFile(path).read("blk.0.attn_q.weight")[:, 0], stored)
    np.testing.assert_array_equal(open_checkpoint(path).read(name), tensors[name])


def test_stop_ids_come_from_every_key_that_names_one(tmp_path):
    config = hf_config()
    keys = {"eos_token_id": 5, "eot_token_id": 9, "eom_token_id": 5}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", config, random_tensors(config), metadata=metadata))
    assert checkpoint.eos_token_ids == (5, 9)
    assert checkpoint.config["eos_token_id"] == [5, 9]


def test_a_model_without_stop_ids_has_none(tmp_path):
    config = hf_config()
    assert open_checkpoint(write_gguf(tmp_path / "x.gguf", config, random_tensors(config))).eos_token_ids == ()


def test_linear_scaling_is_read(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    expected = ModelConfig.from_hf(hf_config(rope_scaling={"type": "linear", "factor": 4.0}))
    assert read_config(tmp_path, hf_config(), metadata=metadata) == expected


def test_the_older_key_of_linear_scaling_is_read(tmp_path):
    expected = ModelConfig.from_hf(hf_config(rope_scaling={"type": "linear", "factor": 4.0}))
    assert read_config(tmp_path, hf_config(), metadata={"llama.rope.scale_linear": 4.0}) == expected


def test_yarn_scaling_is_read(tmp_path):
    metadata = {
        "qwen3.rope.scaling.type": "yarn",
        "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 128,
    }
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    expected = ModelConfig.from_hf(hf_config("qwen3", rope_scaling=scaling))
    assert read_config(tmp_path, hf_config("qwen3"), metadata=metadata) == expected
    metadata["qwen3.rope.scaling.attn_factor"] = 2.0
    scaled = read_config(tmp_path, hf_config("qwen3"), metadata=metadata)
    assert scaled.rope.cos_sin_scale == pytest.approx(2 * expected.rope.cos_sin_scale)


def llama3_divisors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What a converter stores, frequency by frequency."""
    divisors = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (pair / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize(("factor", "original", "theta"), [(8.0, 8192, 5e5), (32.0, 8192, 5e5), (8.0, 512, 1e4)])
def test_llama3_divisors_become_the_scaling_that_made_them(tmp_path, factor, original, theta):
    config = hf_config(head_dim=32, rope_theta=theta, max_position_embeddings=131072)
    divisors = llama3_divisors(theta, 32, factor, 1.0, 4.0, original)
    found = read_config(tmp_path, config, extra={"rope_freqs.weight": divisors})
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    assert found == ModelConfig.from_hf({**config, "rope_scaling": scaling})


def test_divisors_of_one_are_no_scaling(tmp_path):
    config = hf_config()
    found = read_config(tmp_path, config, extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert found == ModelConfig.from_hf(config)


def test_other_divisors_are_refused(tmp_path):
    divisors = llama3_divisors(1e4, 64, 8.0, 1.0, 3.0, 512)  # high 3 instead of 4
    for wrong in (divisors, np.arange(1, 33, dtype=np.float32), divisors[8:]):
        with pytest.raises(ValueError, match=r"rope_freqs.weight .* is not a llama3 rope scaling"):
            read_config(tmp_path, hf_config(head_dim=64), extra={"rope_freqs.weight": wrong})


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "lacks 'factor'"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 of 8"),
        ({"llama.attention.value_length": 4}, "value_length"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.sliding_window": 128}, "sliding_window=128"),
        ({"llama.block_count": None}, "lacks the key llama.block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv=.* one whole number"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(tmp_path, metadata, said):
    with pytest.raises(ValueError, match=said):
        read_config(tmp_path, hf_config(), metadata=metadata)


@pytest.mark.parametrize(("key", "value"), [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)])
def test_yarn_variants_are_refused_by_name(tmp_path, key, value):
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        f"llama.rope.scaling.{key}": value,
    }
    with pytest.raises(ValueError, match=f"{key}={value}"):
        read_config(tmp_path, hf_config(), metadata=metadata)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    config = hf_config() | {"model_type": "falcon"}
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(hf_config()))
    with pytest.raises(ValueError, match="'falcon' is not supported; the known ones are llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_an_unknown_tensor_keeps_its_name(tmp_path):
    config = hf_config()
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32), "strange.weight": np.ones(2, np.float32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", config, random_tensors(config), extra=extra))
    assert set(extra) <= set(checkpoint.shapes)
