"""Gated DeltaNet (arXiv 2412.06464): linear attention whose recurrent state is corrected, not only added to."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import Block, TokenBlock
from jaxspec.kv_cache import CacheSizes
from jaxspec.models.config import ModelConfig
from jaxspec.models.delta_cache import DeltaCache, Steps, move, unit
from jaxspec.models.layers import Angles, Linear, RMSNorm, apply_all, init_weight


class DeltaNet(nnx.Module):
    """Convolution, delta rule, and a norm with a gate."""

    def __init__(self, config: ModelConfig, *, lead: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs | None):
        delta = config.delta
        assert delta is not None
        hidden, heads = config.hidden_size, delta.num_value_heads
        values = heads * delta.value_size
        for name, size in delta.projections.items():
            setattr(self, name, Linear(hidden, size, bias=False, lead=lead, dtype=dtype, rngs=rngs))
        self.conv = init_weight(rngs, (*lead, delta.conv_width, 1, delta.kernel), dtype)
        # Kept in float32: they are exponents.
        self.log_rate = nnx.Param(jnp.zeros((*lead, heads), jnp.float32))
        self.time_bias = nnx.Param(jnp.zeros((*lead, heads), jnp.float32))
        self.norm = RMSNorm(delta.value_size, eps=config.rms_norm_eps, lead=lead, dtype=dtype)
        self.out_proj = Linear(values, hidden, bias=False, lead=lead, dtype=dtype, rngs=rngs)
        self.config = delta

    @classmethod
    def init_cache(cls, config: ModelConfig, num_layers: int, sizes: CacheSizes) -> DeltaCache:
        assert config.delta is not None
        return DeltaCache.zeros(num_layers, config.delta, sizes)

    @classmethod
    def pending_shapes(cls, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError("a draft with a recurrent state is not supported; resolve refuses it.")

    def extend(
        self,
        x: jax.Array,
        angles: Angles,
        block: TokenBlock,
        cache: DeltaCache | None,
        layer: int | jax.Array,
        earlier: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Runs x [B, N, E] from the committed state; returns the output and `Steps` as pending."""
        assert earlier is None, "a state does not know which nodes come before it"
        assert isinstance(block, Block), "a text without rows has no state to begin with"
        assert block.ancestors is None, "a recurrent state has one past: only a chain is run"
        assert cache is not None
        queries_keys_values, gate, rate, time = self._project(x)
        state, before = cache.before(block, layer)
        queries, keys, values = self._convolve(queries_keys_values, before)
        decay = -jnp.exp(self.log_rate[...]) * jax.nn.softplus(time.astype(jnp.float32) + self.time_bias[...])
        steps = Steps(queries_keys_values, keys, values, decay, jax.nn.sigmoid(rate.astype(jnp.float32)))
        out = self._recur(state, queries, steps)
        out = self.norm(out.astype(x.dtype)).astype(jnp.float32) * nnx.silu(gate.astype(jnp.float32))
        return self.out_proj(out.astype(x.dtype).reshape(*x.shape[:2], -1)), tuple(steps)

    def _project(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Inputs of the convolution [B, N, C], gate [B, N, HV, Dv], and rate and time [B, N, HV]."""
        delta = self.config
        made = apply_all(x, *(getattr(self, name) for name in delta.projections))
        lead, heads = x.shape[:2], (delta.num_value_heads, delta.value_size)
        if not delta.grouped:
            mixed, gate, rate, time = made
            return mixed, gate.reshape(*lead, *heads), rate, time
        group = delta.num_value_heads // delta.num_key_heads
        wide, narrow = (y.reshape(*lead, delta.num_key_heads, -1) for y in made)
        values = group * delta.value_size
        ends = (delta.key_size, 2 * delta.key_size, 2 * delta.key_size + values)
        *parts, gate = jnp.split(wide, ends, axis=-1)
        mixed = jnp.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)
        rate, time = (y.reshape(*lead, -1) for y in jnp.split(narrow, 2, axis=-1))
        return mixed, gate.reshape(*lead, *heads), rate, time

    def _convolve(self, inputs: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Causal convolution of inputs [B, N, C] behind earlier ones; queries, keys and values by head."""
        delta, num_tokens = self.config, inputs.shape[1]
        seen = jnp.concatenate([before, inputs], axis=1)
        kernel = self.conv[...][:, 0]
        mixed = sum(seen[:, at : at + num_tokens] * kernel[:, at] for at in range(delta.kernel))
        mixed = nnx.silu(mixed)
        width = delta.num_key_heads * delta.key_size
        queries, keys, values = jnp.split(mixed, (width, 2 * width), axis=-1)
        lead = inputs.shape[:2]
        queries, keys = (y.reshape(*lead, -1, delta.key_size) for y in (queries, keys))
        return unit(queries) * delta.key_size**-0.5, keys, values.reshape(*lead, -1, delta.value_size)

    def _recur(self, state: jax.Array, queries: jax.Array, steps: Steps) -> jax.Array:
        """What the state answers to each query [B, N, HK, Dk], after its own token: float32 [B, N, HV, Dv]."""
        group = state.shape[1] // queries.shape[2]

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            query, *moves = token
            state = move(state, *moves)
            return state, jnp.einsum("bhkv,bhk->bhv", state, jnp.repeat(query, group, axis=1))

        tokens = tuple(jnp.moveaxis(leaf, 1, 0) for leaf in (queries, *steps[1:]))
        _, out = jax.lax.scan(step, state, tokens)
        return jnp.moveaxis(out, 0, 1)
