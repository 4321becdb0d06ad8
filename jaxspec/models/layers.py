"""Layers that model families share: linear, norm, rotary positions, grouped-query attention, gated MLP.

`lead` is a prefix of every weight's shape: () for one layer, (L,) for L equal layers stacked to be scanned.
"""

import functools
import math
from collections.abc import Callable
from typing import ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.attention import PLAIN_SCORING, Scoring, TokenBlock
from jaxspec.kv_cache import CacheSizes, PagedKV
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.weights import Matrix, multiply

INIT_STDDEV = 0.02
# By the names that configs have for them.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

# cos and sin, float32 [B, N, 1, half of what is rotated].
Angles: TypeAlias = tuple[jax.Array, jax.Array]
Weight = TypeVar("Weight", bound=nnx.Param)


def init_weight(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: jnp.dtype, kind: type[Weight] = nnx.Param
) -> Weight:
    """A random weight; zeros without `rngs`, for a model whose weights come from a checkpoint."""
    if rngs is None:
        return kind(jnp.zeros(shape, dtype))
    return kind(jax.random.normal(rngs.params(), shape, dtype) * INIT_STDDEV)


class Linear(nnx.Module):
    """y = x W (+ b), with W [in, out]."""

    def __init__(
        self, size_in: int, size_out: int, *, bias: bool, lead: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs | None
    ):
        self.weight = init_weight(rngs, (*lead, size_in, size_out), dtype, Matrix)
        self.bias = nnx.Param(jnp.zeros((*lead, size_out), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.add_bias(*multiply(x, self.weight))

    def add_bias(self, y: jax.Array) -> jax.Array:
        return y if self.bias is None else y + self.bias[...]


def apply_all(x: jax.Array, *layers: Linear) -> tuple[jax.Array, ...]:
    """What each of several linear layers makes of one x, their weights read in one go."""
    made = multiply(x, *(layer.weight for layer in layers))
    return tuple(layer.add_bias(y) for layer, y in zip(layers, made, strict=True))


class RMSNorm(nnx.Module):
    """w * (x / rms(x)); the statistic in float32, cast back before the weight (as Llama and Qwen do).

    With `offset` it is (1 + w) * (x / rms(x)), all of it in float32 (as Gemma does).
    """

    def __init__(self, size: int, *, eps: float, lead: tuple[int, ...] = (), dtype: jnp.dtype, offset: bool = False):
        fill = jnp.zeros if offset else jnp.ones
        self.weight = nnx.Param(fill((*lead, size), dtype))
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:
            return ((1 + self.weight[...].astype(jnp.float32)) * normed).astype(x.dtype)
        return self.weight[...] * normed.astype(x.dtype)


def norm_of(config: ModelConfig, size: int, *, lead: tuple[int, ...] = (), dtype: jnp.dtype) -> RMSNorm:
    """A norm as the model's family has it."""
    return RMSNorm(size, eps=config.rms_norm_eps, lead=lead, dtype=dtype, offset=config.norm_offset)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies, float32 [head_dim / 2].

    default: 1 / theta^(2i/d). linear: divided by the factor. llama3: long wavelengths divided, short ones kept, linear
    in between. yarn (arXiv 2309.00071): the same by rotations over the trained length.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    inverse = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return (inverse / rope.factor).astype(np.float32)
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_freq_factor, rope.high_freq_factor
        trained_len = rope.original_max_position or 0  # never 0: RopeConfig sees to it
        smooth = np.clip((trained_len / wavelength - low) / (high - low), 0, 1)
        return ((1 - smooth) * inverse / rope.factor + smooth * inverse).astype(np.float32)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim, inverse)
    return inverse.astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, head_dim: int, inverse: np.ndarray) -> np.ndarray:
    trained_len = rope.original_max_position or 0  # never 0: RopeConfig sees to it

    def correction(rotations: float) -> float:
        turns = trained_len / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return (inverse / rope.factor * ramp + inverse * (1 - ramp)).astype(np.float32)


def rotary_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> Angles:
    """cos and sin, float32 [B, N, 1, head_dim / 2], computed from positions [B, N]: no table, so no length limit."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.cos_sin_scale, jnp.sin(angles) * rope.cos_sin_scale


def rotate(x: jax.Array, angles: Angles, *, interleaved: bool = False) -> jax.Array:
    """Rotary embedding of x [B, N, heads, D]; of more numbers than there are angles for, the last stay as they are.

    Half-split pairs are half of what is rotated apart. Interleaved ones are neighbours; the result has them half-split.
    """
    cos, sin = (a.astype(x.dtype) for a in angles)
    size = 2 * cos.shape[-1]
    if interleaved:
        first, second = x[..., 0:size:2], x[..., 1:size:2]
    else:
        first, second = jnp.split(x[..., :size], 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., size:]], axis=-1)


def with_earlier(earlier: tuple[jax.Array, ...] | None, pending: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Pending leaves [B, M, ...] of nodes before a block, if any, and the block's own [B, N, ...] behind them."""
    if earlier is None:
        return pending
    return tuple(jnp.concatenate([old, new], axis=1) for old, new in zip(earlier, pending, strict=True))


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases, per-head norms on q and k, and an output gate.

    `size_in` is the width of its input where that is not the model's.
    """

    has_window: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        size_in: int | None = None,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        size_in = size_in or config.hidden_size
        made = 2 * width if config.gated_attention else width
        self.q_proj = Linear(size_in, made, bias=config.qkv_bias, lead=lead, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(size_in, kv_width, bias=config.qkv_bias, lead=lead, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(size_in, kv_width, bias=config.qkv_bias, lead=lead, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias, lead=lead, dtype=dtype, rngs=rngs)
        if config.qk_norm:
            self.q_norm = norm_of(config, config.head_dim, lead=lead, dtype=dtype)
            self.k_norm = norm_of(config, config.head_dim, lead=lead, dtype=dtype)
        else:
            self.q_norm = self.k_norm = None
        self.config = config

    @classmethod
    def init_cache(cls, config: ModelConfig, num_layers: int, sizes: CacheSizes) -> PagedKV:
        return PagedKV.zeros(num_layers, config.num_kv_heads, config.head_dim, sizes)

    @classmethod
    def pending_shapes(cls, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of one token's pending leaves: keys and values."""
        return ((config.num_kv_heads, config.head_dim),) * 2

    def extend(
        self,
        x: jax.Array,
        angles: Angles,
        block: TokenBlock,
        cache: PagedKV | None,
        layer: int | jax.Array,
        earlier: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Attends from x [B, N, E]; returns the output and this block's keys and values [B, N, K, D] as pending.

        `earlier` are pending keys and values [B, M, K, D] of nodes that come before the block and are not committed.
        """
        config = self.config
        heads = (*x.shape[:2], -1, config.head_dim)
        made = apply_all(x, self.q_proj, self.k_proj, self.v_proj)
        keys, values = (y.reshape(heads) for y in made[1:])
        queries, gate = made[0].reshape(heads), None
        if config.gated_attention:
            queries, gate = jnp.split(made[0].reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        pending = keys, values
        keys, values = with_earlier(earlier, pending)
        out = self._attend(block, cache, queries, keys, values, layer)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), pending

    def _attend(
        self,
        block: TokenBlock,
        cache: PagedKV | None,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: int | jax.Array,
    ) -> jax.Array:
        scale, window = self.config.attention_scale, self.config.window if self.has_window else None
        scale = self.config.head_dim**-0.5 if scale is None else scale
        if cache is None:
            assert window is None, "a text without pages is attended to whole"
            return block.attend(queries, keys, values, None, layer, scale)
        scoring = PLAIN_SCORING if window is None else Scoring(window=window)
        return cache.attend(block, queries, keys, values, layer, scale, scoring)


class WindowAttention(Attention):
    """The same over the last `config.window` tokens."""

    has_window: ClassVar[bool] = True


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)); `size` is its inner size where that is not the model's."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        size: int | None = None,
        lead: tuple[int, ...],
        dtype: jnp.dtype,
        rngs: nnx.Rngs | None,
    ):
        inner, outer, bias = size or config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(outer, inner, bias=bias, lead=lead, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(outer, inner, bias=bias, lead=lead, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, outer, bias=bias, lead=lead, dtype=dtype, rngs=rngs)
        self.activation = config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = apply_all(x, self.gate_proj, self.up_proj)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)
