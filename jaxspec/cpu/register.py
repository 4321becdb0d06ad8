"""Whether kernels run on this host, and their registration with XLA."""

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path

import jax

from jaxspec.cpu.call_frame import Version
from jaxspec.cpu.host import Library, VectorUnit, vector_unit

_LIBRARIES: list[Library] = []  # XLA may call them until the process ends


def why_not() -> str | None:
    """Why this host and this version of JAX cannot run the kernels; None where they can."""
    if vector_unit() is None:
        return "they are written for AVX2, AVX-512 and NEON, and this host has none of them"
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return f"the version of XLA's foreign function interface is unknown: there is no {header.name}"
    version = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text(encoding="utf-8"))
    major, minor = map(int, version) if len(version) == 2 else (-1, -1)
    # Within a major version structs only grow at their ends.
    if major != Version.MAJOR or minor < Version.MINOR:
        written = f"{Version.MAJOR}.{Version.MINOR}"
        return f"they are written for XLA's foreign function interface {written}, and this is {'.'.join(version)}"
    return None


def host_unit() -> VectorUnit:
    """The host's vectors.

    Raises:
        NotImplementedError: there are none that kernels are written for.
    """
    unit = vector_unit()
    if unit is None:
        raise NotImplementedError(f"the CPU's kernels do not run here: {why_not()}.")
    return unit


@functools.cache
def register(source: Callable[..., str], unit: VectorUnit, *variant: str) -> str:
    """Compiles a kernel and makes it known to XLA, once in a process; returns the name that it has there.

    Args:
        source: makes the IR of a module with a handler: of the unit, the handler's name, and `variant`.
        unit: the vectors that it computes with.
        variant: which of several kernels `source` is to make.
    """
    kind = "_".join([source.__name__.removesuffix("_source"), *variant])
    name = f"jaxspec_{kind}_{unit.lanes}x{unit.panel_vectors}{'_fma' if unit.has_fma else ''}"
    library = Library(source(unit, name, *variant))
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype, wrap.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, wrap(library.address(name), None, None), platform="cpu")
    _LIBRARIES.append(library)
    return name
