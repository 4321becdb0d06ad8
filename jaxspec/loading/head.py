"""Loads an EAGLE or EAGLE-3 head: what its checkpoint lacks, it shares with its target."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxspec.cpu.panels import Panels
from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.dequantised import refuse_quantised
from jaxspec.loading.head_config import is_speculators, read_head_config
from jaxspec.loading.head_vocab import read_target_ids
from jaxspec.loading.load import LeafPath, fill_module
from jaxspec.models.config import ModelConfig
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.plan import Note

_MAPS = ("d2t", "t2d")


class HeadFile(NamedTuple):
    """A head's checkpoint, read and checked but for its weights.

    Attributes:
        stored: tensor name without "model." -> name in the checkpoint.
        target_ids: the target's token of each of the head's, int32; None where they are the same.
        notes: what the config leaves open.
    """

    checkpoint: Checkpoint
    config: HeadConfig
    stored: Mapping[str, str]
    target_ids: np.ndarray | None
    notes: tuple[Note, ...]


def open_head(checkpoint: Checkpoint, target: ModelConfig, *, fused: bool) -> HeadFile:
    """Reads what a head is, and checks that it fits its target.

    Args:
        checkpoint: of the head, in either dialect.
        target: the model that it drafts for.
        fused: what the algorithm drafts with: EAGLE-3's heads, else EAGLE's.

    Raises:
        ValueError: it is a head of the other kind or of another target, its vocabulary map is missing or wrong, or
            its weights are quantised.
    """
    refuse_quantised(checkpoint)
    stored = stored_names(checkpoint)
    _check_kind(checkpoint, stored, fused=fused)
    config, notes = read_head_config(checkpoint.config, stored, target, checkpoint.path, fused=fused)
    _check_fc(checkpoint, config, stored)
    d2t, t2d = (checkpoint.read(stored[name]) if name in stored else None for name in _MAPS)
    target_ids = read_target_ids(
        d2t, t2d, draft_vocab=config.draft_vocab, target_vocab=target.vocab_size, path=checkpoint.path
    )
    return HeadFile(checkpoint, config, stored, target_ids, tuple(notes))


def load_head(
    file: HeadFile,
    target: Network,
    target_leaves: tuple[jax.Array, ...],
    *,
    dtype: npt.DTypeLike,
    device: SingleDeviceSharding | None = None,
    panel_dtype: str | None = None,
) -> tuple[Network, tuple[jax.Array, ...]]:
    """Loads a head's weights. What it shares with the target are the target's own arrays.

    Args:
        file: from `open_head`.
        target: the model that it drafts for, and `target_leaves` its weights.
        dtype: of every weight: float32, bfloat16 or float16.
        device: where the leaves go, as a sharding; the default device if None.
        panel_dtype: weights that are multiplied become panels of this dtype, as the target's are; None is plain arrays.

    Raises:
        ValueError: tensors are missing, not expected or of another shape; the error lists their names.
    """
    config = file.config
    layer = "midlayer" if _has_layer(file.stored, "midlayer") else "layers.0"
    places = Head.tensor_map(config, layer)
    given: dict[LeafPath, jax.Array | Panels] = {}
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in places and f"{name}.weight" not in file.stored:
            given[places.pop(f"{name}.weight").path] = of_target(target, target_leaves, name)
    if file.target_ids is not None:
        given[("target_ids",)] = jnp.asarray(file.target_ids, device=device)
    filled = fill_module(
        file.checkpoint,
        lambda kind: Head(config, dtype=kind, rngs=None),
        {file.stored.get(name, name): place for name, place in places.items()},
        dtype=dtype,
        ignored=("*.rotary_emb.inv_freq", *(file.stored[name] for name in _MAPS if name in file.stored)),
        given=given,
        device=device,
        panel_dtype=panel_dtype,
    )
    return Network(config, Head, filled.graphdef, filled.treedef), filled.leaves


def of_target(target: Network, leaves: tuple[jax.Array, ...], name: str) -> jax.Array | Panels:
    """The target's array; a tied target has one for both."""
    state = dict(nnx.to_flat_state(jax.tree.unflatten(target.treedef, leaves)))
    return state[(name,) if (name,) in state else ("embed_tokens",)].get_value()


def stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Heads come with and without "model." before their names."""
    stored: dict[str, str] = {}
    for name in checkpoint.shapes:
        bare = name.removeprefix("model.")
        if bare in stored:
            raise ValueError(
                f"{checkpoint.path} holds {stored[bare]} and {name}, which are one tensor; leave one of them out."
            )
        stored[bare] = name
    return stored


def is_fused_head(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a head is EAGLE-3's, by its config and the names of its tensors without "model."."""
    return is_speculators(config) or bool(_fused_signs(names))


def _fused_signs(names: Iterable[str]) -> list[str]:
    """Names that only EAGLE-3's heads have."""
    names = list(names)
    signs = [name for name in names if name.startswith("midlayer.") or name.endswith("hidden_norm.weight")]
    return signs + [name for name in _MAPS if name in names]


def _has_layer(names: Iterable[str], layer: str) -> bool:
    return any(name.startswith(f"{layer}.") for name in names)


def _check_kind(checkpoint: Checkpoint, stored: Mapping[str, str], *, fused: bool) -> None:
    """Refuses a head that another algorithm drafts with, by what is in the file: configs often do not say."""
    signs = _fused_signs(stored)
    is_fused = is_fused_head(checkpoint.config, stored)
    if is_fused == fused or "fc.weight" not in stored:
        return
    width = checkpoint.shapes[stored["fc.weight"]][-1]
    if is_fused:
        why = f"it has {signs[0]}, and fc reads {width} values" if signs else "its config is speculators' eagle3"
        raise ValueError(f"{checkpoint.path} is an EAGLE3 head ({why}); set algorithm='EAGLE3'.")
    raise ValueError(
        f"{checkpoint.path} is an EAGLE head (fc reads {width} values, an embedding and one feature, and there is no "
        "hidden_norm.weight); set algorithm='EAGLE'."
    )


def _check_fc(checkpoint: Checkpoint, config: HeadConfig, stored: Mapping[str, str]) -> None:
    """Checks what `fc` reads before shapes are compared in general, because here the fix is known."""
    if config.fc_bias and "fc.weight" in stored and "fc.bias" not in stored:
        raise ValueError(
            f"{checkpoint.path} has no fc.bias, and its config does not say that there is none; set "
            '"bias": false in the head\'s config.json if it was trained without.'
        )
    shape = checkpoint.shapes.get(stored.get("fc.weight", ""), ())
    features = len(config.capture) * config.target_hidden
    expected = features if config.fused else features + config.target_embed
    if len(shape) != 2 or shape[1] == expected:
        return
    if config.fused and shape[1] % config.target_hidden == 0:
        raise ValueError(
            f"{checkpoint.path}: fc reads {shape[1] // config.target_hidden} layers of {config.target_hidden} values, "
            f"and the config names {len(config.capture)} ({list(config.capture)}, counted by outputs); set "
            "eagle_aux_hidden_state_layer_ids in the head's config.json to the layers that it was trained on."
        )
    raise ValueError(
        f"{checkpoint.path}: fc reads {shape[1]} values, and the target gives {expected} "
        f"({len(config.capture)} features of {config.target_hidden}{'' if config.fused else ', and an embedding'}); "
        "set draft_model to a head of this target."
    )
