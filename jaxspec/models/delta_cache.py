"""What layers with a delta rule remember of a row: a recurrent state, and the last inputs of their convolution.

A state cannot be taken back, so it does not move before tokens are accepted: a block leaves what a replay needs as
pending, and `commit` replays the accepted path. A row that begins anew, with no committed tokens, begins at zero.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention import Block
from jaxspec.kv_cache import Accepted, CacheSizes
from jaxspec.models.parts import DeltaConfig

NORM_EPS = 1e-6  # of the unit length of queries and keys


class Steps(NamedTuple):
    """What moves the state, a step for each token; leading axes are layers, rows or both."""

    inputs: jax.Array  # [..., N, C], of the convolution
    keys: jax.Array  # [..., N, HK, Dk], of any length
    values: jax.Array  # [..., N, HV, Dv]
    decay: jax.Array  # float32 [..., N, HV], log of what the state is multiplied by
    rate: jax.Array  # float32 [..., N, HV], how much of the value is written; 0 writes nothing


def unit(x: jax.Array) -> jax.Array:
    """x [..., D] at length 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + NORM_EPS)


def move(state: jax.Array, keys: jax.Array, values: jax.Array, decay: jax.Array, rate: jax.Array) -> jax.Array:
    """One step of the delta rule: the state forgets, and its answer to the key becomes more like the value.

    Args:
        state: float32 [..., HV, Dk, Dv].
        keys: [..., HK, Dk], brought to length 1 here; value heads of one key head are neighbours.
        values: [..., HV, Dv].
        decay, rate: float32 [..., HV].
    """
    keys = jnp.repeat(unit(keys), state.shape[-3] // keys.shape[-2], axis=-2)
    state = state * jnp.exp(decay)[..., None, None]
    answer = jnp.einsum("...kv,...k->...v", state, keys)
    return state + keys[..., None] * (rate[..., None] * (values - answer))[..., None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """States and convolution inputs of equal layers, by row."""

    state: jax.Array  # float32 [L, R, HV, Dk, Dv]
    inputs: jax.Array  # [L, R, kernel - 1, C], the last ones

    @classmethod
    def zeros(cls, num_layers: int, config: DeltaConfig, sizes: CacheSizes) -> "DeltaCache":
        lead = (num_layers, sizes.num_rows)
        heads = (config.num_value_heads, config.key_size, config.value_size)
        inputs = jnp.zeros((*lead, config.kernel - 1, config.conv_width), sizes.dtype)
        return cls(jnp.zeros((*lead, *heads), jnp.float32), inputs)

    def before(self, block: Block, layer: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """State [B, HV, Dk, Dv] and inputs [B, kernel - 1, C] of a layer before a block."""
        return _unless_new(block, self.state[layer], axis=0), _unless_new(block, self.inputs[layer], axis=0)

    def take(self, row_ids: jax.Array) -> "DeltaCache":
        return jax.tree.map(lambda leaf: leaf.at[:, row_ids].get(mode="clip"), self)

    def put(self, row_ids: jax.Array, local: "DeltaCache") -> "DeltaCache":
        return jax.tree.map(lambda leaf, new: leaf.at[:, row_ids].set(new, mode="drop"), self, local)

    def commit(self, pending: tuple[jax.Array, ...], block: Block, accepted: Accepted) -> "DeltaCache":
        """Replays the accepted nodes of `Steps` (leaves [L, B, N, ...]); a row without any stays as it is."""
        steps = Steps(*pending)
        path = accepted.path

        def along(leaf: jax.Array) -> jax.Array:
            return jnp.take_along_axis(leaf, path.reshape(1, *path.shape, *(1,) * (leaf.ndim - 3)), axis=2)

        def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            return move(state, *token), None

        taken = Steps(*map(along, steps))
        is_kept = (jnp.arange(path.shape[1]) < accepted.count[:, None])[..., None]
        still = taken._replace(decay=jnp.where(is_kept, taken.decay, 0.0), rate=jnp.where(is_kept, taken.rate, 0.0))
        tokens = tuple(jnp.moveaxis(leaf, 2, 0) for leaf in still[1:])
        state, _ = jax.lax.scan(step, _unless_new(block, self.state, axis=1), tokens)

        size = self.inputs.shape[2]
        inputs = jnp.concatenate([_unless_new(block, self.inputs, axis=1), taken.inputs], axis=2)
        last = accepted.count[:, None] + jnp.arange(size)
        inputs = jnp.take_along_axis(inputs, last[None, :, :, None], axis=2)
        moved = (accepted.count > 0)[None, :, None, None]
        return DeltaCache(jnp.where(moved[..., None], state, self.state), jnp.where(moved, inputs, self.inputs))


def _unless_new(block: Block, leaf: jax.Array, *, axis: int) -> jax.Array:
    """Zeros for rows without committed tokens, whatever a row's slot held before; rows are at `axis`."""
    shape = [1] * leaf.ndim
    shape[axis] = -1
    return jnp.where((block.prefix_len > 0).reshape(shape), leaf, 0)
