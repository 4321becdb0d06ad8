"""Hand-written kernels, by the backend that they are for.

A kernel has a plain-jnp twin with the same signature, and the named shapes of `jaxspec.pallas.specs`, which its tests
and benchmarks share. Kernels are imported where they are asked for: Pallas takes a while to import.
"""

from jaxspec.attention import AttentionKernel, two_part_attention

# Lanes of a TPU's vector registers: rows of a pool that are no whole number of them are laid out, and copied, anew.
TPU_LANES = 128


def attention_kernel(backend: str) -> AttentionKernel:
    """What computes attention over pages: for "xla" two parts that XLA compiles, else a kernel."""
    if backend == "cpu":
        from jaxspec.cpu.attend import attend_to_block

        return attend_to_block
    if backend == "pallas_tpu":
        from jaxspec.pallas.split import split_attention
        from jaxspec.pallas.tree_attention_tpu import tree_attention

        return split_attention(tree_attention)
    assert backend == "xla", backend
    return two_part_attention


def padded_head_dim(backend: str, head_dim: int) -> int:
    """Numbers of one token and head in a pool, at least the head's own."""
    return -(-head_dim // TPU_LANES) * TPU_LANES if backend == "pallas_tpu" else head_dim
