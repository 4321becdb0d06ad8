"""Weights as panels, and products with them."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.cpu.product import product_source
from jaxspec.cpu.register import host_unit, register
from jaxspec.cpu.storage import SCALE_ROWS

# Of an int8, but for -128: rounding is symmetric.
LARGEST = 127


@functools.partial(jax.tree_util.register_dataclass, data_fields=["panels", "scales"], meta_fields=["size_out"])
@dataclasses.dataclass(frozen=True)
class Panels:
    """A weight W [K, N] cut into panels of P columns, the last one filled up with zeros.

    Attributes:
        panels: float32, bfloat16 or int8 [..., ceil(N / P), K, P]; a leading axis is one of stacked layers.
        size_out: N.
        scales: of int8, float32 [..., ceil(N / P), ceil(K / SCALE_ROWS), P]; a value of W is that of `panels` times its
            scale. None otherwise.
    """

    panels: jax.Array
    size_out: int
    scales: jax.Array | None = None

    @property
    def dtype(self) -> jnp.dtype:
        """Of what is computed with W, however it is stored."""
        return jnp.dtype(jnp.float32)

    @property
    def arrays(self) -> list[jax.Array]:
        """What the kernel reads."""
        return [self.panels] if self.scales is None else [self.panels, self.scales]

    def columns(self, ids: jax.Array) -> jax.Array:
        """W[:, ids] of an unstacked weight, transposed: float32 [..., K] for int32 [...]."""
        width = self.panels.shape[-1]
        values = self.panels[ids // width, :, ids % width].astype(jnp.float32)
        if self.scales is None:
            return values
        scales = jnp.repeat(self.scales[ids // width, :, ids % width], SCALE_ROWS, axis=-1)
        return values * scales[..., : values.shape[-1]]


@functools.partial(jax.jit, static_argnames=("panel", "axis", "dtype"))
def _cut(weight: jax.Array, panel: int, axis: int, dtype: str) -> tuple[jax.Array, jax.Array | None]:
    """Panels, and their scales where they are stored as int8."""
    missing = -weight.shape[axis] % panel
    filled = jnp.pad(weight, [(0, missing if i == weight.ndim + axis else 0) for i in range(weight.ndim)])
    if axis == -1:
        panels = jnp.moveaxis(filled.reshape(*filled.shape[:-1], -1, panel), -2, -3)
    else:
        panels = jnp.swapaxes(filled.reshape(*filled.shape[:-2], -1, panel, filled.shape[-1]), -1, -2)
    return (panels.astype(dtype), None) if dtype != "int8" else _round(panels)


def _round(panels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nearest int8 values, symmetric about 0, and a scale for every `SCALE_ROWS` of them in a column."""
    *lead, length, width = panels.shape
    filled = jnp.pad(panels, [*[(0, 0)] * len(lead), (0, -length % SCALE_ROWS), (0, 0)])
    groups = filled.reshape(*lead, -1, SCALE_ROWS, width)
    scales = jnp.max(jnp.abs(groups), axis=-2) / LARGEST
    steps = jnp.round(groups / jnp.where(scales > 0, scales, 1)[..., None, :])
    return steps.reshape(filled.shape)[..., :length, :].astype(jnp.int8), scales


def pack(weight: jax.Array, *, axis: int = -1, dtype: str = "float32") -> Panels:
    """Cuts W into panels of the host's width.

    Args:
        weight: float32 [..., K, N], or [..., N, K] with axis -2.
        axis: which one is cut.
        dtype: that the values are rounded to: float32, bfloat16 or int8.
    """
    panels, scales = _cut(weight, host_unit().panel, axis, dtype)
    return Panels(panels, weight.shape[axis], scales)


def products(x: jax.Array, weights: Sequence[Panels]) -> tuple[jax.Array, ...]:
    """x W for each of several weights [K, N], in one pass over the threads.

    Each value is a chain of multiply-adds in float32 in the order of k, so a row's result is the same, bit for bit,
    whatever rows it is computed with, and however W's values are stored.

    Args:
        x: float32 [..., K].
        weights: unstacked, all of K rows and stored alike.

    Returns:
        float32 [..., N] each.
    """
    name = register(product_source, host_unit(), weights[0].panels.dtype.name)
    rows = x.reshape(-1, x.shape[-1])
    shapes = [jax.ShapeDtypeStruct((rows.shape[0], weight.size_out), jnp.float32) for weight in weights]
    found = jax.ffi.ffi_call(name, shapes)(rows, *(array for weight in weights for array in weight.arrays))
    return tuple(y.reshape(*x.shape[:-1], -1) for y in found)
