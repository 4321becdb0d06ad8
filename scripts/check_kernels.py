"""Compares kernels with their twin over all named shapes of `jaxspec.pallas.specs`: on a TPU or a GPU, or interpreted.

    python scripts/check_kernels.py                      # all shapes and dtypes; in the interpreter some minutes
    python scripts/check_kernels.py --only tree-64 --dtype bfloat16

Without a TPU or a GPU the kernel for TPUs runs in the interpreter. What is no committed token is NaN. The end is an
error where a kernel is further from its twin than it may be; what a kernel does not take is named.
"""

import argparse
import contextlib
import sys
import time

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxspec.pallas.specs import SPECS, TOLERANCE, Spec


def difference(spec: Spec, dtype: str) -> float:
    """The largest difference between the kernel's result and its twin's."""
    inputs = spec.inputs(dtype)
    with jax.default_matmul_precision("highest"):
        expected = np.asarray(inputs.attend("xla"), np.float32)
        backend = {"gpu": "pallas_gpu"}.get(jax.default_backend(), "pallas_tpu")
        interpreted = jax.default_backend() == "cpu"
        with pltpu.force_tpu_interpret_mode() if interpreted else contextlib.nullcontext():
            return float(np.max(np.abs(np.asarray(inputs.attend(backend), np.float32) - expected)))


def main(arguments: list[str] | None = None) -> None:
    """Prints a line a shape."""
    described = (__doc__ or "").split("\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(description=described)
    parser.add_argument("--only", default="", help="shapes whose name holds this (default: all)")
    parser.add_argument("--dtype", choices=list(TOLERANCE), help="default: each of them")
    args = parser.parse_args(arguments)
    names = [name for name in SPECS if args.only in name]
    if not names:
        sys.exit(f"error: no shape's name holds --only {args.only}; there are {', '.join(SPECS)}.")
    failed = 0
    every = ["bfloat16"] if jax.default_backend() == "gpu" else list(TOLERANCE)  # what its tensor cores multiply
    for name in names:
        for dtype in [args.dtype] if args.dtype else every:
            start = time.perf_counter()
            try:
                found = difference(SPECS[name], dtype)
            except NotImplementedError as error:
                print(f"{name:<32} {dtype:<9} not taken: {error}", flush=True)
                continue
            failed += not found <= TOLERANCE[dtype]  # NaN is no agreement
            verdict = "ok" if found <= TOLERANCE[dtype] else "TOO FAR"
            print(f"{name:<32} {dtype:<9} {found:.1e}  {verdict:<8} {time.perf_counter() - start:6.1f} s", flush=True)
    if failed:
        sys.exit(f"error: {failed} results are further from the twin than they may be.")


if __name__ == "__main__":
    main()
