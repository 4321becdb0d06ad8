"""Hand-written kernels, by the backend that they are for.

A kernel has a plain-jnp twin with the same signature, and the named shapes of `jaxspec.pallas.specs`, which its tests
and benchmarks share. Kernels are imported where they are asked for: Pallas takes a while to import.
"""

import importlib
from collections.abc import Callable
from typing import Any

from jaxspec.attention import AttentionInputs, AttentionKernel, Partial, Scoring, prefix_attention, two_part_attention

# What a token's row in a pool is a multiple of, by backend. A TPU's vector registers have 128 lanes: rows that do not
# fill them get another layout from XLA, and the pool is copied. A GPU's tensor cores take 128 bytes of bfloat16.
ROW_MULTIPLES = {"pallas_tpu": 128, "pallas_gpu": 64}


def attention_kernel(backend: str) -> AttentionKernel:
    """What computes attention over pages: for "xla" two parts that XLA compiles, else a kernel."""
    if backend == "xla":
        return two_part_attention
    if backend == "cpu":
        from jaxspec.cpu.attend import attend_to_block

        return attend_to_block
    from jaxspec.pallas.split import split_attention

    return split_attention(_module(backend).tree_attention)


def prefix_kernel(backend: str) -> Callable[[AttentionInputs, Scoring], Partial]:
    """What attends to pages alone, so that parts of a prefix can be joined by their log-sum-exp."""
    return prefix_attention if backend == "xla" else _module(backend).prefix_attention


def _module(backend: str) -> Any:
    assert backend in ROW_MULTIPLES, f"{backend} has no kernels of Pallas"
    return importlib.import_module(f"jaxspec.pallas.{backend.replace('pallas', 'tree_attention')}")


def padded_head_dim(backend: str, head_dim: int) -> int:
    """Numbers of one token and head in a pool, at least the head's own."""
    multiple = ROW_MULTIPLES.get(backend, 1)
    return -(-head_dim // multiple) * multiple
