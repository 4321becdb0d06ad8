"""Weights that are multiplied: plain arrays, or on the CPU panels that its kernel reads.

This is the one place where models meet the kernel: a weight says by its value how it is multiplied.
"""

from collections.abc import MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.cpu.panels import Panels, pack, products


class Matrix(nnx.Param):
    """W [in, out], to be multiplied as x W."""


class Table(nnx.Param):
    """W [out, in], to be multiplied as x W^T; a table of token embeddings that also makes the logits is one."""


def multiply(x: jax.Array, *weights: nnx.Param, dtype: jnp.dtype | None = None) -> tuple[jax.Array, ...]:
    """x times each weight: [..., out] from [..., in]; several weights of one x are read in one go.

    Args:
        x: [..., in].
        weights: each a `Matrix` or a `Table`; all plain, or all panels.
        dtype: of the results; None is that of x.
    """
    values = [weight.get_value() for weight in weights]
    if isinstance(values[0], Panels):
        return products(x, values)
    axes = [1 if isinstance(weight, Table) else 0 for weight in weights]
    return tuple(
        jax.lax.dot_general(x, value, (((x.ndim - 1,), (axis,)), ((), ())), preferred_element_type=dtype)
        for value, axis in zip(values, axes)
    )


def look_up(table: nnx.Param, ids: jax.Array) -> jax.Array:
    """Rows of a table [V, E]: [..., E] for int32 [...]."""
    value = table.get_value()
    return value.columns(ids) if isinstance(value, Panels) else value[ids]


def dtype_of(weight: nnx.Param) -> jnp.dtype:
    return weight.get_value().dtype


def pack_weights(state: MutableMapping[Any, Any], dtype: str = "float32") -> None:
    """Turns every weight that is multiplied into panels, in place and one at a time.

    Args:
        state: flat, by path.
        dtype: that the panels' values are stored as: float32, bfloat16 or int8.
    """
    for path, weight in state.items():
        value = weight.get_value()
        if isinstance(weight, Matrix | Table) and not isinstance(value, Panels):
            state[path] = weight.replace(pack(value, axis=-2 if isinstance(weight, Table) else -1, dtype=dtype))
