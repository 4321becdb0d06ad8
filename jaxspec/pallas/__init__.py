"""Hand-written kernels: none in this version.

Kernels come here in threes: the kernel (`x_gpu.py`, `x_tpu.py`), its plain-jnp twin with the same signature, and the
named shapes that tests and benchmarks share. Until then the two-part attention of `jaxspec.attention` (paged prefix and
tree part, merged by log-sum-exp) is compiled by XLA on CPU, GPU and TPU alike.
"""
