"""Writes a trained head in the format of the EAGLE-3 repository, which SGLang and vLLM read as well."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from jaxspec.loading.convert.output import staged_folder, write_json
from jaxspec.loading.convert.tensors import Tensor, write_safetensors
from jaxspec.loading.head_config import LAYER_IDS, TRAINED_LEN
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.training.teacher import Leaves

# What the target has itself.
_SHARED = ("embed_tokens.weight",)


def export_head(
    network: Network, leaves: Leaves, folder: Path, *, dtype: npt.DTypeLike, card: str, overwrite: bool = False
) -> None:
    """Writes config.json, model.safetensors and README.md; the embedding stays with the target.

    Args:
        network: an EAGLE-3 head, and `leaves` its weights.
        folder: to be made.
        dtype: of the weights: float32, float16 or bfloat16.
        card: text of README.md.
        overwrite: replace a checkpoint at `folder`.

    Raises:
        FileExistsError, ValueError: the folder is in the way.
    """
    config: HeadConfig = network.config
    state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
    tensors: dict[str, Tensor] = {}
    for name, source in Head.tensor_map(config, "midlayer").items():
        if name not in _SHARED:
            values = np.asarray(state[source.path].get_value())
            tensors[name] = _tensor((values.T if source.transpose else values).astype(dtype))
    if config.has_map:
        ids = np.asarray(state[("target_ids",)].get_value(), np.int64)
        in_draft = np.zeros(config.layer.vocab_size, bool)
        in_draft[ids] = True
        tensors |= {"d2t": _tensor(ids - np.arange(len(ids))), "t2d": _tensor(in_draft)}
    with staged_folder(folder, overwrite=overwrite) as staging:
        write_json(staging / "config.json", exported_config(config, np.dtype(dtype).name))
        write_safetensors(staging / "model.safetensors", tensors)
        (staging / "README.md").write_text(card, encoding="utf-8")


def exported_config(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head."""
    layer = config.layer
    switches = ("norm_before_residual", "fc_norm", "norm_before_fc")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab,
        "hidden_size": layer.hidden_size,
        "target_hidden_size": config.target_hidden,
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
        "eagle_config": {LAYER_IDS: list(config.capture), "use_aux_hidden_state": True},
        **{name: True for name in switches if getattr(config, name)},
    }


def _tensor(values: np.ndarray) -> Tensor:
    return Tensor(values.dtype, values.shape, lambda: values)
