"""Loads a target's own draft layer (multi-token prediction) from the target's checkpoint."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy.typing as npt

from jaxspec.cpu.panels import Panels
from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.dequantised import dequantised
from jaxspec.loading.head import of_target
from jaxspec.loading.load import LeafPath, fill_module
from jaxspec.loading.names import mtp_prefixes, stored_by_name
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.fields import read_object, read_optional
from jaxspec.models.mtp import MTPConfig, MTPHead
from jaxspec.models.network import Network
from jaxspec.models.own_draft import OwnDraft, Wiring
from jaxspec.plan import WARNING, Note


class OwnHead(NamedTuple):
    """A target's own draft layer, found and not yet read.

    Attributes:
        stored: tensor name in the one dialect -> name in the checkpoint.
        prefix: of the layer's tensors.
        notes: what is worth saying of it.
    """

    checkpoint: Checkpoint
    config: MTPConfig
    own: OwnDraft
    stored: Mapping[str, str]
    prefix: str
    notes: tuple[Note, ...]


def count_own_layers(checkpoint: Checkpoint, target: ModelConfig) -> int:
    """How many draft layers of its own a target's checkpoint holds, by its tensors: configs often do not say."""
    if FAMILIES[target.architecture].own_draft is None:
        return 0
    return len(mtp_prefixes(stored_by_name(checkpoint), target.num_layers))


def open_own_head(checkpoint: Checkpoint, target: ModelConfig, *, wiring: Wiring | None = None) -> OwnHead | None:
    """Finds a target's own draft layer; None where it has none.

    Args:
        checkpoint: of the target.
        target: its config.
        wiring: None is the family's.
    """
    own = FAMILIES[target.architecture].own_draft
    if own is None:
        return None
    checkpoint = dequantised(checkpoint)
    stored = stored_by_name(checkpoint)
    prefixes = mtp_prefixes(stored, target.num_layers)
    if not prefixes:
        return None
    notes = []
    config = read_object(checkpoint.config, "text_config") or checkpoint.config
    said = read_optional(config, own.count_field, int)
    if said not in (None, len(prefixes)):
        reason = f"the config says {own.count_field}={said}, and there are tensors of {len(prefixes)}"
        notes.append(Note("num_mtp_layers", said, len(prefixes), reason, WARNING))
    if len(prefixes) > 1:
        reason = "every draft is made by the first layer, as the family's wiring has it"
        notes.append(Note("num_mtp_layers", len(prefixes), 1, reason))
    return OwnHead(checkpoint, MTPConfig.of(target, own, wiring), own, stored, prefixes[0], tuple(notes))


def load_own_head(
    head: OwnHead,
    target: Network,
    target_leaves: tuple[jax.Array, ...],
    *,
    dtype: npt.DTypeLike,
    panel_dtype: str | None = None,
) -> tuple[Network, tuple[jax.Array, ...]]:
    """Loads the layer's weights. Embedding and vocabulary head are the target's own arrays.

    Raises:
        ValueError: tensors are missing or of another shape; the error lists their names.
    """
    config = head.config
    places = MTPHead.tensor_map(config, head.own, head.prefix, head.stored)
    given: dict[LeafPath, jax.Array | Panels] = {("embed_tokens",): of_target(target, target_leaves, "embed_tokens")}
    if config.wiring.head == "main" and not config.ties_head:
        given["lm_head",] = of_target(target, target_leaves, "lm_head")
    filled = fill_module(
        head.checkpoint,
        lambda kind: MTPHead(config, dtype=kind, rngs=None),
        {head.stored.get(name, name): place for name, place in places.items()},
        dtype=dtype,
        ignored=("*",),  # whoever loads the target says what is not expected
        given=given,
        panel_dtype=panel_dtype,
    )
    return Network(config, MTPHead, filled.graphdef, filled.treedef), filled.leaves
