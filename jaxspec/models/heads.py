"""Feature-level draft heads: EAGLE (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840).

A head reads pairs (h_i, t_{i+1}): the target's hidden state at i and the token after it, and predicts t_{i+2}. Its one
decoder layer has its own keys and values, one row per pair; the rotary position of pair i is i.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import Block, TokenBlock
from jaxspec.kv_cache import Accepted, Cache, CacheSizes
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import MLP, Attention, Linear, RMSNorm, init_weight, rotary_angles
from jaxspec.models.segments import Pending, empty_pending, init_caches
from jaxspec.models.tensor_names import Source, layer_tensors
from jaxspec.models.weights import Matrix, Table, dtype_of, look_up, multiply


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head's sizes and switches; hashable.

    Attributes:
        layer: the head's own sizes (hidden, heads, rope, ...); `layer.vocab_size` is the target's vocabulary.
        fused: EAGLE-3: features of several layers, and [embedding; hidden] as the attention's input. False is EAGLE:
            [embedding; hidden] through `fc` into a layer without its input norm, and no final norm.
        capture: what is read of the target: 0-based layers (their outputs), or "normed" (after its final norm).
        target_hidden: width of each captured feature.
        target_embed: width of the token embedding.
        draft_vocab: tokens the head chooses from; `layer.vocab_size` is all.
        fc_bias: whether `fc` has a bias.
        norm_before_residual: the residual is the normed feature, not the feature.
        fc_norm: a norm for each captured layer before `fc`.
        norm_before_fc: one norm over the concatenated features before `fc`.
        feed_normed: the next step reads the state after the final norm.
        final_norm: logits are made after the final norm.
        lm_head: "matrix" [E, draft_vocab]; "table" [draft_vocab, E], as a tied target stores it; or "embedding", the
            head's own token embedding.
    """

    layer: ModelConfig
    fused: bool
    capture: tuple[int | str, ...]
    target_hidden: int
    target_embed: int
    draft_vocab: int
    fc_bias: bool = False
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    feed_normed: bool = False
    final_norm: bool = True
    lm_head: str = "matrix"

    @property
    def has_map(self) -> bool:
        """Whether the head's tokens are a subset of the target's."""
        return self.draft_vocab != self.layer.vocab_size


class HeadOutput(NamedTuple):
    """What a head makes of pairs."""

    hidden: jax.Array  # [B, N, E], the feature handed to the next step
    state: jax.Array  # [B, N, E], what `logits` reads
    pending: tuple[Pending, ...]


class _Layer(nnx.Module):
    """The head's decoder layer."""

    def __init__(self, config: HeadConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        layer = config.layer
        width = layer.hidden_size + (config.target_embed if config.fused else 0)
        norm: dict[str, Any] = {"eps": layer.rms_norm_eps, "dtype": dtype}
        self.self_attn = Attention(layer, size_in=width, lead=(), dtype=dtype, rngs=rngs)
        self.mlp = MLP(layer, lead=(), dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, **norm)
        self.input_layernorm = RMSNorm(config.target_embed, **norm) if config.fused else None
        self.hidden_norm = RMSNorm(layer.hidden_size, **norm) if config.fused else None


class PairLayer(nnx.Module):
    """What all heads on features share: one layer that reads pairs, and its cache."""

    config: Any  # its `layer` is the layer as a model of one
    fc: Linear

    @classmethod
    def init_cache(cls, config: Any, sizes: CacheSizes) -> tuple[Cache, ...]:
        """Empty caches: one layer."""
        return init_caches(config.layer, sizes)

    def empty_pending(self, num_rows: int, num_nodes: int) -> tuple[Pending, ...]:
        """Room for the pending rows of `num_nodes` uncommitted nodes."""
        return empty_pending(self.config.layer, num_rows, num_nodes, dtype_of(self.fc.weight))

    def commit(
        self, caches: tuple[Cache, ...], pending: tuple[Pending, ...], block: Block, accepted: Accepted
    ) -> tuple[Cache, ...]:
        """Writes the accepted path of a block of pairs."""
        return tuple(cache.commit(rows, block, accepted) for cache, rows in zip(caches, pending, strict=True))


class Head(PairLayer):
    """An EAGLE or EAGLE-3 head. Embedding and vocabulary head may be the target's own arrays."""

    def __init__(self, config: HeadConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        layer = config.layer
        hidden = layer.hidden_size
        norm: dict[str, Any] = {"eps": layer.rms_norm_eps, "dtype": dtype}
        features = len(config.capture) * config.target_hidden
        size_in = features if config.fused else features + config.target_embed
        self.config = config
        is_shared = config.lm_head == "embedding"  # one leaf for both
        table = (layer.vocab_size, config.target_embed)
        self.embed_tokens = init_weight(rngs, table, dtype, Table if is_shared else nnx.Param)
        if is_shared:
            self.lm_head = self.embed_tokens
        elif config.lm_head == "matrix":
            self.lm_head = init_weight(rngs, (hidden, config.draft_vocab), dtype, Matrix)
        else:
            self.lm_head = init_weight(rngs, (config.draft_vocab, hidden), dtype, Table)
        self.fc = Linear(size_in, hidden, bias=config.fc_bias, lead=(), dtype=dtype, rngs=rngs)
        self.layer = _Layer(config, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(hidden, **norm) if config.fused else None
        self.input_norm = RMSNorm(features, **norm) if config.norm_before_fc else None
        self.fc_norm = (
            nnx.List([RMSNorm(config.target_hidden, **norm) for _ in config.capture]) if config.fc_norm else None
        )
        # Target id of each of the head's tokens.
        self.target_ids = nnx.Param(jnp.arange(config.draft_vocab, dtype=jnp.int32)) if config.has_map else None

    @classmethod
    def tensor_map(cls, config: HeadConfig, layer: str) -> dict[str, Source]:
        """Tensor name -> where it goes, with `layer` as the name of the decoder layer; the vocabulary map is apart."""
        found = {"embed_tokens.weight": Source(("embed_tokens",)), "fc.weight": Source(("fc", "weight"), True)}
        if config.lm_head != "embedding":
            found["lm_head.weight"] = Source(("lm_head",), config.lm_head == "matrix")
        if config.fc_bias:
            found["fc.bias"] = Source(("fc", "bias"))
        if config.norm_before_fc:
            found["input_norm.weight"] = Source(("input_norm", "weight"))
        if config.fc_norm:
            found |= {f"fc_norm.{j}.weight": Source(("fc_norm", j, "weight")) for j in range(len(config.capture))}
        names = layer_tensors(config.layer)
        if config.fused:
            found["norm.weight"] = Source(("norm", "weight"))
            names.append(("hidden_norm.weight", False))
        for name, transpose in names:
            if config.fused or name != "input_layernorm.weight":
                found[f"{layer}.{name}"] = Source(("layer", *name.split(".")), transpose)
        return found

    def fuse(self, features: tuple[jax.Array, ...]) -> jax.Array:
        """The target's features [B, N, Ht] each, as the head reads them: [B, N, E]."""
        if self.fc_norm is not None:
            features = tuple(norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True))
        joined = jnp.concatenate(features, axis=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return self.fc(joined) if self.config.fused else joined

    def extend(
        self,
        tokens: jax.Array,
        hidden: jax.Array,
        block: TokenBlock,
        caches: Sequence[Any],
        *,
        earlier: tuple[Pending, ...] | None = None,
    ) -> HeadOutput:
        """Runs pairs: hidden [B, N, E] (from `fuse`, or the head's own) and the tokens int32 [B, N] after them."""
        config, layer = self.config, self.layer
        embedded = look_up(self.embed_tokens, jnp.maximum(tokens, 0))
        if config.fused and layer.input_layernorm is not None and layer.hidden_norm is not None:
            normed = layer.hidden_norm(hidden)
            inputs = jnp.concatenate([layer.input_layernorm(embedded), normed], axis=-1)
            residual = normed if config.norm_before_residual else hidden
        else:
            inputs = residual = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
        angles = rotary_angles(config.layer.rope, config.layer.head_dim, block.positions)
        before = None if earlier is None else tuple(leaf[0] for leaf in earlier[0])
        attended, (keys, values) = layer.self_attn.extend(inputs, angles, block, caches[0], 0, before)
        x = residual + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = x if self.norm is None else self.norm(x)
        state = normed if config.final_norm else x
        return HeadOutput(normed if config.feed_normed else x, state, ((keys[None], values[None]),))

    def own_logits(self, state: jax.Array) -> jax.Array:
        """Over the head's own vocabulary: float32 [..., draft_vocab]."""
        return multiply(state, self.lm_head, dtype=jnp.dtype(jnp.float32))[0]

    def logits(self, state: jax.Array) -> jax.Array:
        """Over the target's vocabulary, -inf where the head has no token: float32 [..., V]."""
        own = self.own_logits(state)
        if self.target_ids is None:
            return own
        full = jnp.full((*own.shape[:-1], self.config.layer.vocab_size), -jnp.inf, jnp.float32)
        return full.at[..., self.target_ids[...]].set(own)
