"""The mask of a block as kernels take it."""

import jax
import jax.numpy as jnp

from jaxspec.attention import nearest
from jaxspec.tree import pack_bits, unpack_bits


def signed_words(ancestors: jax.Array, num_keys: int, window: int | None) -> jax.Array:
    """Ancestor bits within the window, with a sign as vector units take them: int32 [B, N, words]."""
    if window is not None:
        ancestors = pack_bits(nearest(unpack_bits(ancestors, num_keys), window))
    return jax.lax.bitcast_convert_type(ancestors, jnp.int32)
