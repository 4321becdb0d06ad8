"""The decoder-only transformer of every family; its layers' kinds are in the config."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import Block, TokenBlock
from jaxspec.kv_cache import Accepted, Cache, CacheSizes
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import init_weight, norm_of
from jaxspec.models.segments import (
    Pending,
    Segment,
    build_segments,
    empty_pending,
    init_caches,
    run_segments,
    runs_of,
)
from jaxspec.models.tensor_names import Source, has_stacked_experts, layer_sources
from jaxspec.models.weights import Matrix, Table, dtype_of, look_up, multiply

__all__ = ["Decoder", "Extended", "Segment"]


class Extended(NamedTuple):
    """A block's outputs, before anything is committed."""

    hidden: jax.Array  # [B, N, E], before the final norm
    captured: tuple[jax.Array, ...]  # [B, N, E] each: what was asked for, in that order
    pending: tuple[Pending, ...]  # per cache: of attention keys and values, [L, B, N, K, D]


class Decoder(nnx.Module):
    """A decoder-only transformer.

    Args:
        config: sizes and switches.
        dtype: of weights and activations; logits are float32.
        scan_layers: stack equal layers and scan over them (fewer leaves to dispatch, faster to trace; on the CPU the
            slices of stacked weights are copied, measured 20 % slower at one row).
        rngs: for random weights; None leaves zeros, to be filled from a checkpoint.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, scan_layers: bool, rngs: nnx.Rngs | None):
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = init_weight(rngs, size, dtype, Table if config.tie_embeddings else nnx.Param)
        self.segments = build_segments(config, scan_layers=scan_layers, dtype=dtype, rngs=rngs)
        self.norm = norm_of(config, config.hidden_size, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else init_weight(rngs, size[::-1], dtype, Matrix)
        self.config = config
        self.scan_layers = scan_layers

    @classmethod
    def init_cache(cls, config: ModelConfig, sizes: CacheSizes) -> tuple[Cache, ...]:
        """Empty caches, one per layer kind."""
        return init_caches(config, sizes)

    def empty_pending(self, num_rows: int, num_nodes: int) -> tuple[Pending, ...]:
        """Room for the pending rows of `num_nodes` uncommitted nodes, to be passed as `earlier`."""
        return empty_pending(self.config, num_rows, num_nodes, dtype_of(self.embed_tokens))

    def extend(
        self,
        tokens: jax.Array,
        block: TokenBlock,
        caches: Sequence[Cache | None],
        *,
        earlier: tuple[Pending, ...] | None = None,
        capture: Sequence[int | str] = (),
    ) -> Extended:
        """Runs a block of tokens against the committed prefix; commits nothing.

        Args:
            tokens: int32 [B, N]; -1 (no draft) reads row 0 of the embedding, and its outputs mean nothing.
            block: positions, prefix and ancestors.
            caches: from `init_cache`; None for a block that has no prefix.
            earlier: pending of uncommitted nodes before this block, as `Extended.pending`.
            capture: what `captured` is to hold: layers (0-based, their outputs), "hidden" (the last one's) or "normed"
                (after the final norm).
        """
        x = look_up(self.embed_tokens, jnp.maximum(tokens, 0))
        if self.config.scale_embedding:
            x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        keep = any(isinstance(name, int) for name in capture)
        x, outputs, pending = run_segments(
            self.segments, self.config, x, block, caches, earlier, scan_layers=self.scan_layers, keep=keep
        )
        captured = tuple(
            outputs[name] if isinstance(name, int) else {"normed": self.norm, "hidden": _as_it_is}[name](x)
            for name in capture
        )
        return Extended(x, captured, pending)

    def commit(
        self, caches: tuple[Cache, ...], pending: tuple[Pending, ...], block: Block, accepted: Accepted
    ) -> tuple[Cache, ...]:
        """Writes the accepted path of a block into every cache."""
        return tuple(cache.commit(rows, block, accepted) for cache, rows in zip(caches, pending, strict=True))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head: [..., E] -> float32 [..., V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return multiply(self.norm(hidden), head, dtype=jnp.dtype(jnp.float32))[0]

    @classmethod
    def tensor_map(cls, config: ModelConfig, scan_layers: bool, names: Collection[str] = ()) -> dict[str, Source]:
        """Hugging Face tensor name -> where it goes; `names` are those of the checkpoint, where that matters."""
        found = {
            "model.embed_tokens.weight": Source(("embed_tokens",)),
            "model.norm.weight": Source(("norm", "weight")),
        }
        if not config.tie_embeddings:
            found["lm_head.weight"] = Source(("lm_head",), transpose=True)
        for place, run in enumerate(runs_of(config, scan_layers)):
            for layer in range(run.first, run.first + run.size):
                prefix, row = f"model.layers.{layer}.", layer - run.first if scan_layers else None
                stacked = has_stacked_experts(names, prefix)
                own = layer_sources(config, run.kind, ("segments", place), row, is_stacked=stacked)
                found |= {prefix + name: source for name, source in own.items()}
        return found

    @classmethod
    def ignored(cls, config: ModelConfig) -> tuple[str, ...]:
        """Tensors that checkpoints may carry and the model does not need."""
        tables = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
        # Some repositories store the tied head all the same.
        return (*tables, "lm_head.weight") if config.tie_embeddings else tables


def _as_it_is(x: jax.Array) -> jax.Array:
    return x
