"""Multi-head latent attention (arXiv 2405.04434 section 2.1), absorbed or expanded.

A token's keys and values are made from one narrow row c, and a part of every key that carries the position from the
token itself. Absorbed, queries are brought into the space of c instead: the cache holds c and the rotated part, one row
a token for all heads. Expanded, it holds every head's keys and values. Both are the same function.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import TokenBlock
from jaxspec.kv_cache import CacheSizes, PagedKV, PagedLatent
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import Angles, Linear, RMSNorm, apply_all, init_weight, rotate, with_earlier

# The family's own default for the two norms inside, whatever rms_norm_eps says of the others.
INNER_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Queries, keys and values through narrow rows."""

    def __init__(self, config: ModelConfig, *, lead: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs | None):
        latent, hidden, heads = config.latent, config.hidden_size, config.num_heads
        assert latent is not None
        linear = {"bias": False, "lead": lead, "dtype": dtype, "rngs": rngs}
        norm = {"eps": INNER_EPS, "lead": lead, "dtype": dtype}
        self.q_a_proj = Linear(hidden, latent.query_rank, **linear)
        self.q_a_layernorm = RMSNorm(latent.query_rank, **norm)
        self.q_b_proj = Linear(latent.query_rank, heads * (latent.key_size + latent.rotated_size), **linear)
        self.kv_a_proj = Linear(hidden, latent.rank + latent.rotated_size, **linear)
        self.kv_a_layernorm = RMSNorm(latent.rank, **norm)
        # A head's keys, then its values; never multiplied as a whole when absorbed, so no `Matrix`.
        self.kv_b_proj = init_weight(rngs, (*lead, latent.rank, heads * (latent.key_size + latent.value_size)), dtype)
        self.o_proj = Linear(heads * latent.value_size, hidden, **linear)
        self.config = config

    @classmethod
    def init_cache(cls, config: ModelConfig, num_layers: int, sizes: CacheSizes) -> PagedLatent | PagedKV:
        latent = config.latent
        assert latent is not None
        if latent.absorbed:
            return PagedLatent.zeros(num_layers, latent.rank + latent.rotated_size, sizes)
        return PagedKV.zeros(num_layers, config.num_heads, latent.key_size + latent.rotated_size, sizes)

    @classmethod
    def pending_shapes(cls, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of one token's pending leaves."""
        latent = config.latent
        assert latent is not None
        if latent.absorbed:
            return ((1, latent.rank + latent.rotated_size),)
        return ((config.num_heads, latent.key_size + latent.rotated_size),) * 2

    def extend(
        self,
        x: jax.Array,
        angles: Angles,
        block: TokenBlock,
        cache: PagedLatent | PagedKV | None,
        layer: int | jax.Array,
        earlier: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Attends from x [B, N, E]; returns the output and the block's rows, or its keys and values, as pending."""
        config = self.config
        latent, scale = config.latent, config.attention_scale
        assert latent is not None
        assert scale is not None
        narrow, row = apply_all(x, self.q_a_proj, self.kv_a_proj)
        queries = self.q_b_proj(self.q_a_layernorm(narrow)).reshape(*x.shape[:2], config.num_heads, -1)
        plain, turned = jnp.split(queries, [latent.key_size], axis=-1)
        turned = rotate(turned, angles, interleaved=config.rope_interleaved)
        row, shared = jnp.split(row[:, :, None], [latent.rank], axis=-1)
        row, shared = self.kv_a_layernorm(row), rotate(shared, angles, interleaved=config.rope_interleaved)
        run = self._absorbed if isinstance(cache, PagedLatent) else self._expanded
        out, pending = run(plain, turned, row, shared, block, cache, layer, earlier, scale)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), pending

    def _by_head(self) -> tuple[jax.Array, jax.Array]:
        """What makes keys, and values, of a row: [R, H, Dk] and [R, H, Dv]."""
        latent = self.config.latent
        assert latent is not None
        both = self.kv_b_proj[...].reshape(latent.rank, self.config.num_heads, -1)
        keys, values = jnp.split(both, [latent.key_size], axis=-1)
        return keys, values

    def _absorbed(self, plain, turned, row, shared, block, cache, layer, earlier, scale):
        to_keys, to_values = self._by_head()
        queries = jnp.concatenate([jnp.einsum("bnhk,rhk->bnhr", plain, to_keys), turned], axis=-1)
        pending = (jnp.concatenate([row, shared], axis=-1),)
        (rows,) = with_earlier(earlier, pending)
        out = cache.attend(block, queries, rows, layer, scale)[..., : row.shape[-1]]
        return jnp.einsum("bnhr,rhv->bnhv", out, to_values), pending

    def _expanded(self, plain, turned, row, shared, block, cache, layer, earlier, scale):
        to_keys, to_values = self._by_head()
        keys = jnp.einsum("bnr,rhk->bnhk", row[:, :, 0], to_keys)
        keys = jnp.concatenate([keys, jnp.broadcast_to(shared, (*keys.shape[:3], shared.shape[-1]))], axis=-1)
        values = jnp.einsum("bnr,rhv->bnhv", row[:, :, 0], to_values)
        size = values.shape[-1]
        # Of one width, as kernels take them.
        pending = keys, jnp.pad(values, [(0, 0)] * 3 + [(0, keys.shape[-1] - size)])
        queries = jnp.concatenate([plain, turned], axis=-1)
        all_keys, all_values = with_earlier(earlier, pending)
        if cache is None:
            out = block.attend(queries, all_keys, all_values, None, layer, scale)
        else:
            out = cache.attend(block, queries, all_keys, all_values, layer, scale)
        return out[..., :size], pending
