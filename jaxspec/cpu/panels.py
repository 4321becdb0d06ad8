"""Weights as panels, and products with them."""

import ctypes
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxspec.cpu.call_frame import Version
from jaxspec.cpu.host import Library, VectorUnit, vector_unit
from jaxspec.cpu.product import product_source

_LIBRARIES: list[Library] = []  # XLA may call them until the process ends


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
    return Panels(_cut(weight, _host_unit().panel, axis), weight.shape[axis])


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
    name = _register(_host_unit())
    rows = x.reshape(-1, x.shape[-1])
    shapes = [jax.ShapeDtypeStruct((rows.shape[0], weight.size_out), jnp.float32) for weight in weights]
    found = jax.ffi.ffi_call(name, shapes)(rows, *(weight.panels for weight in weights))
    return tuple(y.reshape(*x.shape[:-1], -1) for y in found)


def why_not() -> str | None:
    """Why this host and this version of JAX cannot run the kernel; None where they can."""
    if vector_unit() is None:
        return "it is written for AVX2, AVX-512 and NEON, and this host has none of them"
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return f"the version of XLA's foreign function interface is unknown: there is no {header.name}"
    version = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8"))
    major, minor = map(int, version) if len(version) == 2 else (-1, -1)
    # Within a major version structs only grow at their ends.
    if major != Version.MAJOR or minor < Version.MINOR:
        written = f"{Version.MAJOR}.{Version.MINOR}"
        return f"it is written for XLA's foreign function interface {written}, and this is {'.'.join(version)}"
    return None


def _host_unit() -> VectorUnit:
    unit = vector_unit()
    if unit is None:
        raise NotImplementedError(f"weights cannot be cut into panels: {why_not()}.")
    return unit


@functools.cache
def _register(unit: VectorUnit) -> str:
    """Compiles the kernel and makes it known to XLA, once in a process; returns the name that it has there."""
    name = f"jaxspec_panels_{unit.lanes}x{unit.panel_vectors}{'_fma' if unit.has_fma else ''}"
    library = Library(product_source(unit, name))
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype, wrap.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, wrap(library.address(name), None, None), platform="cpu")
    _LIBRARIES.append(library)
    return name
