"""A block as kernels take it: its mask in words with a sign, or none of its keys."""

import jax
import jax.numpy as jnp

from jaxspec.attention import AttentionInputs, nearest
from jaxspec.tree import pack_bits, unpack_bits


def signed_words(ancestors: jax.Array, num_keys: int, window: int | None) -> jax.Array:
    """Ancestor bits within the window, with a sign as vector units take them: int32 [B, N, words]."""
    if window is not None:
        ancestors = pack_bits(nearest(unpack_bits(ancestors, num_keys), window))
    return jax.lax.bitcast_convert_type(ancestors, jnp.int32)


def prefix_of(inputs: AttentionInputs) -> AttentionInputs:
    """The same queries before no key of their own: a causal block of nodes that see the prefix alone."""
    values = inputs.values
    return inputs._replace(
        keys=inputs.keys[:, :0],
        values=None if values is None else values[:, :0],
        block=inputs.block._replace(ancestors=None),
        sinks=None,
    )
