"""Attention over a paged prefix and a block of new tokens on NVIDIA GPUs from Hopper on, in one kernel (Mosaic GPU).

A block of threads is one warpgroup: a row, a kv head, and 64 of the head's query rows, which are the rows of a tensor
core's product. It walks over the prefix, then over the block's own keys, 64 at a time; bulk copies fetch the next step
while the last one is multiplied. All steps share one running softmax, in registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.attention import PLAIN_SCORING, AttentionInputs, Partial, Scoring, walk_range
from jaxspec.pallas.block import prefix_of, signed_words
from jaxspec.pallas.tree_attention_warpgroup import TILE, Operands, Scratch, Sizes, run_warpgroup


def tree_attention(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """See `jaxspec.attention.two_part_attention`, its twin.

    Raises:
        NotImplementedError: values that are a part of the keys (latent attention).
    """
    (out,) = _attend(inputs, scoring, is_partial=False)
    return out


def prefix_attention(inputs: AttentionInputs, scoring: Scoring = PLAIN_SCORING) -> Partial:
    """See `jaxspec.attention.prefix_attention`, its twin; raises what `tree_attention` does."""
    return Partial(*_attend(prefix_of(inputs), scoring, is_partial=True))


def _attend(inputs: AttentionInputs, scoring: Scoring, *, is_partial: bool) -> list[jax.Array]:
    """The result, or the sums over all keys that there are."""
    queries, keys, values, pool, layer, block, sinks = inputs
    if values is None:
        raise NotImplementedError(
            f"the kernel for GPUs has no latent attention: sums of {TILE} x {scoring.value_dim} numbers do not fit "
            "into the registers of a warpgroup; use 'xla'"
        )
    num_queries, num_keys, head_dim = queries.shape[2], keys.shape[1], queries.shape[3]
    num_nodes = block.positions.shape[1]
    page_size, width = pool[0].shape[3:]
    sizes = Sizes(num_queries // num_nodes, num_nodes, num_keys, width, page_size, scoring)
    more, columns = -num_queries % TILE, (0, width - head_dim)
    own = [(0, 0), (0, 0), (0, sizes.own_steps * TILE - num_keys), columns]
    begin, _ = walk_range(block, TILE, scoring.window)

    def per_query(array: jax.Array) -> jax.Array:
        """Numbers of nodes, the last axis, as those of whole tiles of query rows."""
        repeated = jnp.repeat(array, sizes.group, axis=-1)
        return jnp.pad(repeated, [(0, 0)] * (array.ndim - 1) + [(0, more)])

    words = None
    if block.ancestors is not None:
        words = per_query(signed_words(block.ancestors, num_keys, scoring.window).transpose(0, 2, 1))
    operands = Operands(
        layer=jnp.full(1, layer, jnp.int32),
        length=block.prefix_len,
        begin=begin,
        table=jnp.maximum(block.table, 0),
        queries=jnp.pad(queries, [(0, 0), (0, 0), (0, more), columns]),
        words=words,
        positions=None if scoring.window is None else per_query(block.positions),
        sinks=None if sinks is None else jnp.pad(sinks, [(0, 0), (0, more)]),
        keys=jnp.pad(keys.transpose(0, 2, 1, 3), own),
        values=jnp.pad(values.transpose(0, 2, 1, 3), own),
        key_pool=pool[0],
        value_pool=pool[1],
    )
    wide, *sums = _call(sizes, operands, is_partial=is_partial)
    return [wide[:, :, :num_queries, :head_dim], *(column[:, :, :num_queries] for column in sums)]


def _call(sizes: Sizes, operands: Operands, *, is_partial: bool) -> list[jax.Array]:
    num_rows, num_kv, num_queries, head_dim = operands.queries.shape
    dtype = operands.queries.dtype
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    slots = plgpu.SMEM((2, TILE, head_dim), dtype, transforms=transforms)
    scratch = Scratch(
        queries=plgpu.SMEM((TILE, head_dim), dtype, transforms=transforms),
        keys=slots,
        values=slots,
        query_barrier=plgpu.Barrier(),
        key_barriers=plgpu.Barrier(num_barriers=2),
        value_barriers=plgpu.Barrier(num_barriers=2),
    )

    # The result, or the fields of `Partial`.
    outs = [jax.ShapeDtypeStruct(operands.queries.shape, dtype)]
    if is_partial:
        sums = [operands.queries.shape, *[operands.queries.shape[:3]] * 2]
        outs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums]
    # What a call leaves out is no operand.
    used = [name for name in Operands._fields if getattr(operands, name) is not None]

    def body(*refs: Any) -> None:
        given = Operands(*[None] * len(Operands._fields))._replace(**dict(zip(used, refs)))
        results, held = refs[len(used) : len(used) + len(outs)], refs[len(used) + len(outs) :]
        run_warpgroup(sizes, given, results, Scratch(*held))

    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=tuple(scratch),
        grid=(num_rows, num_kv, num_queries // TILE),
        grid_names=("row", "head", "part"),
        kernel_name="tree_attention_gpu",
    )(*[getattr(operands, name) for name in used])
