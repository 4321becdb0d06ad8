"""Kernels on several chips: XLA cannot split them by itself, so each chip runs them for its own kv heads."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxspec.attention import AttentionInputs, AttentionKernel, Block, Scoring

# Axis of the mesh in use (`jax.set_mesh`) over which heads are split.
MODEL_AXIS = "model"


def axis_of_heads(num_kv: int) -> str | None:
    """The mesh's axis that the kv heads are split over; None where there is none, or they do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    chips = dict(mesh.shape).get(MODEL_AXIS, 1)
    return MODEL_AXIS if chips > 1 and num_kv % chips == 0 else None


def in_mesh() -> bool:
    """Whether a program is being traced for several chips."""
    return jax.sharding.get_abstract_mesh().size > 1


def split_attention(kernel: AttentionKernel) -> AttentionKernel:
    """The kernel, run by each chip of the mesh in use for its kv heads."""

    def attend(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
        axis, whole = axis_of_heads(inputs.keys.shape[2]), PartitionSpec()
        by_head, third = PartitionSpec(None, axis), PartitionSpec(None, None, axis)
        specs = AttentionInputs._make([by_head, third, third, third, whole, whole, PartitionSpec(axis)])
        split = jax.shard_map(
            lambda inputs: kernel(inputs, scoring), in_specs=(specs,), out_specs=by_head, check_vma=False
        )
        return split(inputs._replace(layer=jax.numpy.asarray(inputs.layer)))

    return attend if in_mesh() else kernel


def split_commit(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel that writes accepted rows, run by each chip of the mesh in use for its kv heads."""

    def commit(pool: tuple[jax.Array, jax.Array], pending: tuple[jax.Array, ...], block: Block, accepted: Any) -> Any:
        axis, whole = axis_of_heads(pool[0].shape[2]), PartitionSpec()
        pools, rows = PartitionSpec(None, None, axis), PartitionSpec(None, None, None, axis)
        split = jax.shard_map(kernel, in_specs=(pools, rows, whole, whole), out_specs=pools, check_vma=False)
        return split(pool, pending, block, accepted)

    return commit if in_mesh() else kernel
