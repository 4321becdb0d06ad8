"""Weights as panels, and products with them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.cpu.product import product_source
from jaxspec.cpu.register import host_unit, register


@functools.partial(jax.tree_util.register_dataclass, data_fields=["panels"], meta_fields=["size_out"])
@dataclasses.dataclass(frozen=True)
class Panels:
    """A weight W [K, N] cut into panels of P columns, the last one filled up with zeros.

    Attributes:
        panels: float32 [..., ceil(N / P), K, P]; a leading axis is one of stacked layers.
        size_out: N.
    """

    panels: jax.Array
    size_out: int

    @property
    def dtype(self) -> jnp.dtype:
        return self.panels.dtype

    def columns(self, ids: jax.Array) -> jax.Array:
        """W[:, ids] of an unstacked weight, transposed: float32 [..., K] for int32 [...]."""
        width = self.panels.shape[-1]
        return self.panels[ids // width, :, ids % width]


@functools.partial(jax.jit, static_argnames=("panel", "axis"))
def _cut(weight: jax.Array, panel: int, axis: int) -> jax.Array:
    missing = -weight.shape[axis] % panel
    filled = jnp.pad(weight, [(0, missing if i == weight.ndim + axis else 0) for i in range(weight.ndim)])
    if axis == -1:
        return jnp.moveaxis(filled.reshape(*filled.shape[:-1], -1, panel), -2, -3)
    return jnp.swapaxes(filled.reshape(*filled.shape[:-2], -1, panel, filled.shape[-1]), -1, -2)


def pack(weight: jax.Array, *, axis: int = -1) -> Panels:
    """Cuts W into panels of the host's width.

    Args:
        weight: float32 [..., K, N], or [..., N, K] with axis -2.
        axis: which one is cut.
    """
    return Panels(_cut(weight, host_unit().panel, axis), weight.shape[axis])


def products(x: jax.Array, weights: Sequence[Panels]) -> tuple[jax.Array, ...]:
    """x W for each of several weights [K, N], in one pass over the threads.

    Each value is a chain of multiply-adds in the order of k, so a row's result is the same, bit for bit, whatever rows
    it is computed with.

    Args:
        x: float32 [..., K].
        weights: unstacked, all of K rows.

    Returns:
        float32 [..., N] each.
    """
    name = register(product_source, host_unit())
    rows = x.reshape(-1, x.shape[-1])
    shapes = [jax.ShapeDtypeStruct((rows.shape[0], weight.size_out), jnp.float32) for weight in weights]
    found = jax.ffi.ffi_call(name, shapes)(rows, *(weight.panels for weight in weights))
    return tuple(y.reshape(*x.shape[:-1], -1) for y in found)
