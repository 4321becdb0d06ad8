"""Layers of a target, made narrower: in the coordinates of the principal components that its embedding has.

As in SliceGPT (arXiv 2401.15024), except that nothing is run to find the components.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.decoder import Segment

# Products that read what a norm made, and products whose output is added to the stream between layers.
_READS = {
    "q_proj": "input_layernorm",
    "k_proj": "input_layernorm",
    "v_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm",
    "up_proj": "post_attention_layernorm",
}
_WRITES = ("o_proj", "down_proj")


def components(table: jax.Array, width: int) -> jax.Array:
    """The `width` principal components of rows [V, E], as columns [E, width]: in them, products change least."""
    return jnp.linalg.eigh(table.T @ table)[1][:, -width:]


def narrow_norm(weight: jax.Array, basis: jax.Array) -> jax.Array:
    """A norm's weight [E] for vectors in the coordinates of a basis [E, W], as far as it stays a weight: [W].

    The mean square of W coordinates is E / W times that of all E, as far as they hold the vector.
    """
    size, width = basis.shape
    return (size / width) ** 0.5 * jnp.einsum("ew,e,ew->w", basis, weight, basis)


def copy_narrowed(own: Segment, layer: Segment, basis: jax.Array) -> None:
    """Makes one layer another one, in the coordinates of a basis [E, W] of the stream between layers.

    The weight of a norm does not turn with the basis; it goes into the products that read what was normed.
    """
    state = dict(nnx.to_flat_state(nnx.state(layer)))
    gains = {name: state[(name, "weight")].get_value() for name in set(_READS.values())}
    for path, leaf in state.items():
        name, value = path[-2], leaf.get_value().astype(jnp.float32)
        if name in gains:
            value = narrow_norm(jnp.ones_like(value), basis)
        elif name in _READS and path[-1] == "weight":
            value = basis.T @ (gains[_READS[str(name)]][:, None] * value)
        elif name in _WRITES:
            value = value @ basis
        state[path] = leaf.replace(value)
    nnx.update(own, nnx.from_flat_state(state))
