"""Writes small checkpoints: Hugging Face folders and GGUF files with random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import save_file

F32 = GGMLQuantizationType.F32
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hf_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json in the public wording: two layers, grouped heads, untied."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    config = {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if family == "qwen3" else 8,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | changes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor that a config asks for, float32, under Hugging Face names."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv_width = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    family = config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        lead = f"model.layers.{layer}"
        shapes |= {f"{lead}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows, columns in (("q", width, hidden), ("k", kv_width, hidden), ("v", kv_width, hidden)):
            shapes[f"{lead}.self_attn.{name}_proj.weight"] = (rows, columns)
            if family == "qwen2" or config.get("attention_bias"):
                shapes[f"{lead}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{lead}.self_attn.o_proj.weight"] = (hidden, width)
        if config.get("attention_bias"):
            shapes[f"{lead}.self_attn.o_proj.bias"] = (hidden,)
        if family == "qwen3":
            shapes |= {f"{lead}.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"{lead}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{lead}.mlp.down_proj.weight"] = (hidden, inner)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, num_shards: int = 1
) -> Path:
    """A Hugging Face folder; several shards come with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def gguf_name(name: str) -> str:
    """blk.3.attn_q.weight for model.layers.3.self_attn.q_proj.weight."""
    part, _, kind = name.rpartition(".")
    if part.startswith("model.layers."):
        _, _, layer, inner = part.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"
    return f"{GGUF_NAMES[part]}.{kind}"


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama files store them: of each head, row i of the first half, then row i of the second."""
    heads = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(np.swapaxes(heads, 1, 2)).reshape(values.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: GGMLQuantizationType = F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file of the same model: matrices of the given type, the rest float32.

    `metadata` adds or replaces keys (None leaves one out); `extra` adds float32 tensors under their GGUF names.
    """
    arch = config["model_type"]
    keys: dict[str, Any] = {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        **(metadata or {}),
    }
    writer = GGUFWriter(path, arch)
    add_keys(writer, keys)
    for name, values in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            values = interleave(values, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            values = interleave(values, config["num_key_value_heads"])
        of_kind = kind if values.ndim == 2 else F32
        writer.add_tensor(gguf_name(name), quantize(values, of_kind), raw_dtype=of_kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def add_keys(writer: GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Adds metadata by the Python type of each value; None is left out."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in keys.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(key, value)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
