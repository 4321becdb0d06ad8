"""A model's own draft layer (multi-token prediction, arXiv 2412.19437 section 2.2), as a head on its features.

Like any feature-level head it reads pairs (h_i, t_{i+1}) and predicts t_{i+2}: both are normed, joined with the
embedding first, and run through a layer of the model's own kind, with its own cache.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import TokenBlock
from jaxspec.models.config import ModelConfig
from jaxspec.models.heads import HeadOutput, PairLayer
from jaxspec.models.layers import Linear, init_weight, norm_of
from jaxspec.models.own_draft import OwnDraft, Wiring
from jaxspec.models.segments import Pending, build_segments, run_segments
from jaxspec.models.tensor_names import Source, has_stacked_experts, layer_sources
from jaxspec.models.weights import Matrix, Table, look_up, multiply

_CAPTURES = {"post": "normed", "pre": "hidden"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """A draft layer's sizes and wiring; hashable.

    Attributes:
        layer: the layer as a model of one.
        wiring: what it reads and feeds.
        ties_head: its embedding is its vocabulary head too, as the target's is.
    """

    layer: ModelConfig
    wiring: Wiring
    ties_head: bool

    @classmethod
    def of(cls, target: ModelConfig, own: OwnDraft, wiring: Wiring | None = None) -> "MTPConfig":
        """Of a target's own draft layer; `wiring` None is the family's."""
        mlp = target.layer_kinds[-1].mlp if own.kind.mlp == "main" else own.kind.mlp
        layer = dataclasses.replace(target, num_layers=1, mixers=(own.kind.mixer,), mlps=(mlp,))
        wiring = own.wiring if wiring is None else wiring
        return cls(layer=layer, wiring=wiring, ties_head=target.tie_embeddings and wiring.head == "main")

    @property
    def capture(self) -> tuple[str, ...]:
        """What is read of the target, see `Decoder.extend`."""
        return (_CAPTURES[self.wiring.hidden],)


class MTPHead(PairLayer):
    """The layer, and what brings a pair to its width. Embedding and vocabulary head may be the target's arrays."""

    def __init__(self, config: MTPConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        layer = config.layer
        hidden = layer.hidden_size
        table = init_weight(rngs, (layer.vocab_size, hidden), dtype, Table if config.ties_head else nnx.Param)
        self.embed_tokens = table
        # One leaf for both where they are tied.
        self.lm_head = table if config.ties_head else init_weight(rngs, (hidden, layer.vocab_size), dtype, Matrix)
        self.embed_norm = norm_of(layer, hidden, dtype=dtype)
        self.hidden_norm = norm_of(layer, hidden, dtype=dtype)
        self.fc = Linear(2 * hidden, hidden, bias=False, lead=(), dtype=dtype, rngs=rngs)
        self.segments = build_segments(layer, scan_layers=False, dtype=dtype, rngs=rngs)
        self.norm = norm_of(layer, hidden, dtype=dtype)
        self.config = config

    @classmethod
    def tensor_map(cls, config: MTPConfig, own: OwnDraft, prefix: str, names: Collection[str]) -> dict[str, Source]:
        """Tensor name -> where it goes; `embed_tokens` and the target's vocabulary head are apart.

        Args:
            config: of the head.
            own: the family's names.
            prefix: of the layer's tensors.
            names: of the checkpoint's.
        """
        places = {
            "fc": Source(("fc", "weight"), True),
            **{name: Source((name, "weight")) for name in ("embed_norm", "hidden_norm", "norm")},
        }
        if config.wiring.head == "own":
            places["lm_head"] = Source(("lm_head",), True)
        found = {own.names[part].format(layer=prefix): place for part, place in places.items()}
        stacked = has_stacked_experts(names, prefix)
        layer = layer_sources(config.layer, config.layer.layer_kinds[0], ("segments", 0), None, is_stacked=stacked)
        return found | {prefix + name: place for name, place in layer.items()}

    def fuse(self, features: tuple[jax.Array, ...]) -> jax.Array:
        """The target's feature as the head reads it: [B, N, E]."""
        (feature,) = features
        return feature

    def extend(
        self,
        tokens: jax.Array,
        hidden: jax.Array,
        block: TokenBlock,
        caches: Sequence[Any],
        *,
        earlier: tuple[Pending, ...] | None = None,
    ) -> HeadOutput:
        """Runs pairs: hidden [B, N, E] (the target's, or the head's own) and the tokens int32 [B, N] after them."""
        wiring = self.config.wiring
        embedded = look_up(self.embed_tokens, jnp.maximum(tokens, 0))
        if wiring.zero_first:
            embedded = jnp.where((block.positions == 0)[..., None], 0, embedded)
        x = self.fc(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x, _, pending = run_segments(
            self.segments, self.config.layer, x, block, caches, earlier, scan_layers=False, keep=False
        )
        normed = self.norm(x)
        return HeadOutput(normed if wiring.link == "post" else x, normed, pending)

    def logits(self, state: jax.Array) -> jax.Array:
        """Over the vocabulary: float32 [..., V]."""
        return multiply(state, self.lm_head, dtype=jnp.dtype(jnp.float32))[0]
