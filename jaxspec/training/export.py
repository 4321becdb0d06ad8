"""Writes trained drafts: heads in the format of the EAGLE repository, which others read as well, and models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxspec.loading.convert.output import staged_folder, write_json
from jaxspec.loading.convert.tensors import Tensor, write_safetensors
from jaxspec.loading.head_config import LAYER_IDS, TRAINED_LEN
from jaxspec.models.decoder import Source
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.teacher import Leaves


def export_head(
    network: Network, leaves: Leaves, folder: Path, card: str, *, dtype: npt.DTypeLike, frozen: Sequence[str]
) -> None:
    """Writes config.json, model.safetensors and README.md, in place of a checkpoint at `folder`.

    Args:
        network: a head, and `leaves` its weights.
        folder: to be made.
        card: text of README.md.
        dtype: of the weights: float32, float16 or bfloat16.
        frozen: leaves that are the target's, which stay with it.

    Raises:
        FileExistsError, ValueError: the folder is in the way.
    """
    config: HeadConfig = network.config
    places = Head.tensor_map(config, "midlayer" if config.fused else "layers.0")
    tensors = _tensors(network, leaves, {name: at for name, at in places.items() if at.path[0] not in frozen}, dtype)
    if config.has_map:
        ids = np.asarray(_state(network, leaves)[("target_ids",)], np.int64)
        in_draft = np.zeros(config.layer.vocab_size, bool)
        in_draft[ids] = True
        tensors |= {"d2t": _tensor(ids - np.arange(len(ids))), "t2d": _tensor(in_draft)}
    _write(folder, exported_config(config, np.dtype(dtype).name), tensors, card)


def export_decoder(
    network: Network,
    leaves: Leaves,
    folder: Path,
    card: str,
    *,
    dtype: npt.DTypeLike,
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Writes a model of its own as a Hugging Face folder; see `export_head`.

    Args:
        config: its config.json.
        tokenizer: the target's, which becomes its own.
    """
    tensors = _tensors(network, leaves, network.kind.tensor_map(network.config, False), dtype)
    _write(folder, {**config, "torch_dtype": np.dtype(dtype).name}, tensors, card, tokenizer)


def _state(network: Network, leaves: Leaves) -> dict[tuple[Any, ...], np.ndarray]:
    state = nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves))
    return {path: np.asarray(leaf.get_value()) for path, leaf in state}


def _tensors(network: Network, leaves: Leaves, places: Mapping[str, Source], dtype: npt.DTypeLike) -> dict[str, Tensor]:
    """Tensors by name, as checkpoints store them."""
    state = _state(network, leaves)
    stored = {name: state[at.path].T if at.transpose else state[at.path] for name, at in places.items()}
    return {name: _tensor(values.astype(dtype)) for name, values in stored.items()}


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], card: str, tokenizer: Tokenizer | None = None
) -> None:
    with staged_folder(folder, overwrite=True) as staging:
        write_json(staging / "config.json", config)
        write_safetensors(staging / "model.safetensors", tensors)
        if tokenizer is not None:
            tokenizer.save(staging, max_len=config["max_position_embeddings"])
        (staging / "README.md").write_text(card, encoding="utf-8")


def exported_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a head, in the dialect of the EAGLE repository."""
    layer = config.layer
    fused: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": config.target_hidden,
        "eagle_config": {LAYER_IDS: list(config.capture), "use_aux_hidden_state": True},
        **{name: True for name in ("norm_before_residual", "fc_norm", "norm_before_fc") if getattr(config, name)},
        **({} if config.final_norm else {"norm_output": False}),
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3" if config.fused else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": max(layer.max_position, TRAINED_LEN),
        "rope_theta": layer.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **(fused if config.fused else {"bias": config.fc_bias}),
    }


def _tensor(values: np.ndarray) -> Tensor:
    return Tensor(values.dtype, values.shape, lambda: values)
