"""Checkpoints as `launch` sees them: what is known before weights are read, and then the weights."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.head import HeadFile, load_head, open_head
from jaxspec.loading.load import load_model
from jaxspec.loading.own_head import OwnHead, count_own_layers, load_own_head, open_own_head
from jaxspec.models import MODELS, ModelConfig
from jaxspec.models.heads import Head
from jaxspec.models.mtp import MTPHead
from jaxspec.models.network import Network
from jaxspec.plan import DraftInfo, Note, TargetInfo
from jaxspec.tokenizer import Tokenizer

Weights = tuple[Network, tuple[jax.Array, ...]]


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes that a checkpoint's weights take in a dtype."""
    return sum(math.prod(shape) for shape in checkpoint.shapes.values()) * jnp.dtype(dtype).itemsize


class DraftSource(Protocol):
    """A draft checkpoint, opened."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def model(self) -> tuple[type[Any], Any]:
        """Class and config of what has a cache."""
        ...

    @property
    def info(self) -> DraftInfo: ...

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the checkpoint left open."""
        ...

    def load(self, target: Weights, *, dtype: str, scan_layers: bool, panel_dtype: str | None) -> Weights: ...


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A whole model: a target, or a draft that is a model of its own."""

    checkpoint: Checkpoint
    config: ModelConfig
    fingerprint: str | None  # of the tokenizer, None where there is none
    notes: tuple[Note, ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> "ModelSource":
        return cls(checkpoint, ModelConfig.from_hf(checkpoint.config), tokenizer and tokenizer.fingerprint)

    @property
    def model(self) -> tuple[type[Any], Any]:
        return MODELS[self.config.architecture], self.config

    @property
    def info(self) -> DraftInfo:
        return DraftInfo(
            architecture=self.config.architecture,
            vocab_size=self.config.vocab_size,
            max_position=self.config.max_position,
            tokenizer_hash=self.fingerprint,
            has_recurrent_state=self.config.has_recurrent_state,
        )

    @property
    def target_info(self) -> TargetInfo:
        """What resolving needs to know of it as a target."""
        config = self.config
        return TargetInfo(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_position=config.max_position,
            num_mtp_layers=count_own_layers(self.checkpoint, config),
            tokenizer_hash=self.fingerprint,
            has_recurrent_state=config.has_recurrent_state,
        )

    def load(
        self, target: Weights | None = None, *, dtype: str, scan_layers: bool, panel_dtype: str | None = None
    ) -> Weights:
        """Network and leaves; a model of its own shares nothing with a target."""
        loaded = load_model(self.checkpoint, dtype=jnp.dtype(dtype), scan_layers=scan_layers, panel_dtype=panel_dtype)
        return Network(loaded.config, self.model[0], loaded.graphdef, loaded.treedef), loaded.leaves


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """A head on the target's features. It has no tokenizer: its tokens are the target's."""

    file: HeadFile

    @property
    def checkpoint(self) -> Checkpoint:
        return self.file.checkpoint

    @property
    def model(self) -> tuple[type[Any], Any]:
        return Head, self.file.config

    @property
    def info(self) -> DraftInfo:
        layer = self.file.config.layer
        return DraftInfo(
            architecture=layer.architecture,
            vocab_size=layer.vocab_size,
            max_position=None,
            draft_vocab=self.file.config.draft_vocab,
        )

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.file.notes

    def load(self, target: Weights, *, dtype: str, scan_layers: bool, panel_dtype: str | None = None) -> Weights:
        """Network and leaves; one layer has nothing to be scanned."""
        return load_head(self.file, *target, dtype=jnp.dtype(dtype), panel_dtype=panel_dtype)


@dataclasses.dataclass(frozen=True)
class OwnHeadSource:
    """The target's own draft layer, in the target's checkpoint."""

    checkpoint: Checkpoint
    head: OwnHead

    @property
    def model(self) -> tuple[type[Any], Any]:
        return MTPHead, self.head.config

    @property
    def info(self) -> DraftInfo:
        layer = self.head.config.layer
        return DraftInfo(architecture=layer.architecture, vocab_size=layer.vocab_size, max_position=None)

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.head.notes

    def load(self, target: Weights, *, dtype: str, scan_layers: bool, panel_dtype: str | None = None) -> Weights:
        """Network and leaves; one layer has nothing to be scanned."""
        return load_own_head(self.head, *target, dtype=jnp.dtype(dtype), panel_dtype=panel_dtype)


def _open_model(checkpoint: Checkpoint, target: ModelConfig, *, with_tokenizer: bool) -> DraftSource:
    return ModelSource.of(checkpoint, checkpoint.load_tokenizer() if with_tokenizer else None)


def _open_head(checkpoint: Checkpoint, target: ModelConfig, *, with_tokenizer: bool, fused: bool) -> DraftSource:
    return HeadSource(open_head(checkpoint, target, fused=fused))


# What a method's draft_model is; methods that are not here have none.
DRAFT_SOURCES: dict[str, Callable[..., DraftSource]] = {
    "STANDALONE": _open_model,
    "EAGLE": functools.partial(_open_head, fused=False),
    "EAGLE3": functools.partial(_open_head, fused=True),
}


def _open_own(target: ModelSource) -> DraftSource | None:
    head = open_own_head(target.checkpoint, target.config)
    return None if head is None else OwnHeadSource(target.checkpoint, head)


# What drafts where no draft_model is named; with methods that are not here, nothing of the target's does.
OWN_DRAFT_SOURCES: dict[str, Callable[[ModelSource], DraftSource | None]] = {"NEXTN": _open_own, "EAGLE": _open_own}
