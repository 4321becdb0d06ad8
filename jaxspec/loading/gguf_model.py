"""What a GGUF file says about its model, in Hugging Face's words: config, tensor names, row order, stop ids."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checks import is_token_id
from jaxspec.loading.gguf_file import GGUFFile
from jaxspec.models.config import RopeConfig

# general.architecture -> the architecture's name in a config.json.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Holds llama3-style scaling as one divisor per frequency; it becomes part of the config.
ROPE_DIVISORS = "rope_freqs.weight"

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that we do not know comes back as it is, and fails to load."""
    if found := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = found.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_MODEL_NAMES[part]}.{kind}" if part in _MODEL_NAMES else name


def stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence, end-of-turn and end-of-message ids, each once.

    Raises:
        ValueError: one is no token id.
    """
    found = {f"tokenizer.ggml.{key}": metadata.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS}
    for key, token in found.items():
        if token is not None and not is_token_id(token):
            raise ValueError(f"{key}={token!r}; expected a token id.")
    return tuple(dict.fromkeys(token for token in found.values() if token is not None))


def read_hf_order(file: GGUFFile, name: str, config: Mapping[str, Any], *, stored: bool = False) -> np.ndarray:
    """A tensor by its GGUF name, with rows in Hugging Face's order: float32, or `stored` as `GGUFFile.read_stored`.

    llama files store q and k with each head's rotary pairs side by side; we rotate halves. Per head of size 6:

        stored rows   0 3 1 4 2 5      ->      0 1 2 3 4 5
    """
    values = file.read_stored(name) if stored else file.read(name)
    part = name.split(".")[-2]
    if file.metadata["general.architecture"] != "llama" or part not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    if values.shape[0] % (2 * heads):
        raise ValueError(
            f"{file.path}: tensor {name} {list(values.shape)} does not divide into {heads} heads of pairs."
        )
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(values.shape)


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata as a `config.json` would say it, in the public wording.

    Raises:
        ValueError: an architecture that is not known, a feature that the models lack, or a missing key.
    """
    metadata = _Metadata(file)
    hidden, heads = metadata.number("embedding_length"), metadata.number("attention.head_count")
    head_dim = metadata.number("attention.key_length", default=hidden // heads)
    _refuse_unsupported(metadata, head_dim)
    config = {
        "architectures": [ARCHITECTURES[metadata.arch]],
        "model_type": metadata.arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_hidden_layers": metadata.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": metadata.arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_theta": metadata.get("rope.freq_base", 10000.0),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(stop_ids(file.metadata)) or None,
    }
    config["rope_scaling"] = _rope_scaling(metadata, config["rope_theta"], head_dim)
    return config


def _refuse_unsupported(metadata: "_Metadata", head_dim: int) -> None:
    """Names what the models lack, or what every file must have."""
    file = metadata.file
    if metadata.number("attention.value_length", default=head_dim) != head_dim:
        raise ValueError(f"{file.path}: attention.value_length differs from key_length={head_dim}: not supported.")
    rotated = metadata.number("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{file.path}: rope.dimension_count={rotated} of {head_dim}: partial rotation is not supported."
        )
    for feature in ("expert_count", "attention.sliding_window"):
        if metadata.get(feature):
            raise ValueError(f"{file.path}: {metadata.arch}.{feature}={metadata.get(feature)} is not supported.")
    if metadata.get("attention.layer_norm_rms_epsilon") is None:
        raise ValueError(f"{file.path} lacks the key {metadata.arch}.attention.layer_norm_rms_epsilon.")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight.")
    if len(shape := file.tensors["token_embd.weight"].shape) != 2:
        raise ValueError(f"{file.path}: tensor token_embd.weight {list(shape)} is no matrix.")


class _Metadata:
    """The keys below the architecture's name."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.arch = str(file.metadata.get("general.architecture"))
        if self.arch not in ARCHITECTURES:
            raise ValueError(
                f"{file.path}: GGUF architecture {self.arch!r} is not supported; the known ones are "
                f"{', '.join(ARCHITECTURES)}."
            )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        # GGUF stores float32: 1e-5 would come back as 9.99999975e-06, and equal models would have unequal configs.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.file.path} lacks the key {self.arch}.{key}.")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.file.path}: {self.arch}.{key}={value!r}; expected one whole number above 0.")
        return value


def _rope_scaling(metadata: _Metadata, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling as a config.json's rope_scaling: from metadata, or from the divisors that llama3 files carry."""
    factor = metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear")
    kind = metadata.get("rope.scaling.type", "linear" if factor else "none")
    divisors = metadata.file.read(ROPE_DIVISORS) if ROPE_DIVISORS in metadata.file.tensors else None
    if divisors is not None and np.all(divisors == 1):
        divisors = None
    if divisors is not None:
        if kind != "none":
            raise ValueError(f"{metadata.file.path} has both {ROPE_DIVISORS} and rope scaling {kind!r}: not supported.")
        return _llama3_scaling(metadata, divisors, theta, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{metadata.file.path}: rope scaling {kind!r} is not supported; known are none, linear and yarn."
        )
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _yarn_fields(metadata, factor)
    return scaling


def _yarn_fields(metadata: _Metadata, factor: float | None) -> dict[str, Any]:
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        value = metadata.get(f"rope.scaling.{key}", neutral)
        if value != neutral:
            raise ValueError(f"{metadata.file.path}: rope.scaling.{key}={value} is not supported; only {neutral} is.")
    fields = {
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length"),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
    }
    multiplier = metadata.get("rope.scaling.yarn_attn_factor", metadata.get("rope.scaling.attn_factor", 1.0))
    if multiplier != 1.0:
        # GGUF's factor multiplies the derived one; Hugging Face's attention_factor replaces it.
        derived = RopeConfig(kind="yarn", factor=factor or 1.0, original_max_position=1).cos_sin_scale
        fields["attention_factor"] = multiplier * derived
    return fields


def _llama3_scaling(metadata: _Metadata, divisors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 scaling whose divisors the file stores; its parameters are nowhere else in the file.

    Every llama3 release uses low 1 and high 4; the factor is the largest divisor, and the trained length is found by
    trying. What none of them reproduces is refused.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor = float(divisors.max())
    for original in (8192, *(1 << power for power in range(9, 21))):
        smooth = np.clip((original / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise ValueError(
        f"{metadata.file.path}: {ROPE_DIVISORS} {list(divisors.shape)} is not a llama3 rope scaling (low 1, high 4): "
        "not supported."
    )
