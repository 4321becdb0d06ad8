"""Writes draft heads with random weights, in both dialects and with every switch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.head import HeadFile, open_head
from jaxspec.loading.load import load_model
from jaxspec.models import Decoder, ModelConfig
from jaxspec.models.network import Network
from tests.loading.files import random_tensors, write_folder

HEADS, KV_HEADS = 2, 1
Weights = tuple[Network, tuple[jax.Array, ...]]


def head_config(dialect: str, target: Mapping[str, Any], *, draft_vocab: int | None = None, **changes: Any) -> dict:
    """A config.json: `dialect` is "eagle", "sglang" (EAGLE-3) or "speculators"; `changes` go to the top level.

    The head reads layers 0 and 1 of the target, by their outputs.
    """
    hidden = changes.pop("hidden_size", target["hidden_size"])
    layer = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": hidden + 8,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": hidden // HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    ids = "eagle_aux_hidden_state_layer_ids"
    if dialect == "eagle":
        return {**layer, "bias": False, **changes}
    if dialect == "sglang":
        named = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {ids: [0, 1]}}
        return {**layer, **named, "draft_vocab_size": draft_vocab, **changes}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab or target["vocab_size"],
        ids: [1, 2],
        **changes,
    }


def head_tensors(
    config: Mapping[str, Any],
    target_hidden: int,
    *,
    own: Sequence[str] = (),
    num_features: int = 2,
    prefix: str = "",
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Every tensor of a head. `own` lists embed_tokens and lm_head where they are not the target's."""
    layer = config.get("transformer_layer_config", config)
    fused = "eagle_config" in config or "speculators_model_type" in config
    name = "layers.0" if "transformer_layer_config" in config or not fused else "midlayer"
    hidden, inner, dim, vocab = (layer[key] for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    draft_vocab = config.get("draft_vocab_size") or vocab
    width = 2 * hidden if fused else hidden
    features = num_features * target_hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features if fused else 2 * hidden),
        f"{name}.post_attention_layernorm.weight": (hidden,),
        f"{name}.self_attn.q_proj.weight": (HEADS * dim, width),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * dim, width),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * dim, width),
        f"{name}.self_attn.o_proj.weight": (hidden, HEADS * dim),
        f"{name}.mlp.gate_proj.weight": (inner, hidden),
        f"{name}.mlp.up_proj.weight": (inner, hidden),
        f"{name}.mlp.down_proj.weight": (hidden, inner),
    }
    if fused:
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "hidden_norm")}
        shapes["norm.weight"] = (hidden,)
    elif config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (features,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (target_hidden,) for j in range(num_features)}
    if "embed_tokens" in own:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if "lm_head" in own:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    random = np.random.default_rng(seed)
    tensors = {key: random.standard_normal(shape, np.float32) * 0.3 for key, shape in shapes.items()}
    if draft_vocab != vocab:
        tensors |= vocabulary_map(random.permutation(vocab)[:draft_vocab], vocab)
    return {prefix + key if key not in ("lm_head.weight", "d2t", "t2d") else key: v for key, v in tensors.items()}


def vocabulary_map(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """d2t and t2d of a head whose tokens are the target's `ids`."""
    marks = np.zeros(vocab, bool)
    marks[ids] = True
    return {"d2t": (ids - np.arange(len(ids))).astype(np.int64), "t2d": marks}


def write_head(folder: Path, dialect: str, target: Mapping[str, Any], *, own: Sequence[str] = (), **changes) -> Path:
    """A head's folder."""
    config = head_config(dialect, target, **changes)
    return write_folder(folder, config, head_tensors(config, target["hidden_size"], own=own))


def load_target(folder: Path, config: Mapping[str, Any]) -> Weights:
    """Network and leaves of a target with random weights."""
    with open_checkpoint(write_folder(folder, config, random_tensors(config))) as checkpoint:
        loaded = load_model(checkpoint, dtype="float32", scan_layers=False)
    return Network(loaded.config, Decoder, loaded.graphdef, loaded.treedef), loaded.leaves


def opened(folder: Path, target: Mapping[str, Any], *, fused: bool = True) -> HeadFile:
    """A head's folder, opened for a target."""
    return open_head(open_checkpoint(folder), ModelConfig.from_hf(target), fused=fused)
