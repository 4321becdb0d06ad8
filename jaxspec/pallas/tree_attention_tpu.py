"""Attention over a paged prefix and a block of new tokens on TPUs, in one kernel (Mosaic).

A program is a row, or a part of a row's queries where all of them are too many. It walks over the row's prefix, a few
pages at a time, and then over the block's own keys, which are still activations and whose mask is a few packed words a
node; see `jaxspec.pallas.tree_attention_walk`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import PLAIN_SCORING, AttentionInputs, Partial, Scoring, walk_range
from jaxspec.pallas.block import prefix_of, signed_words
from jaxspec.pallas.tree_attention_walk import TILE, Operands, Program, Scratch, Sizes, Walk, run_program

# Keys of a step: enough that fetching them takes longer than starting to, and that they fill the lanes of a score.
STEP_LEN = 256
# Most bytes of a step's keys; values are as many, and there are two steps.
STEP_BYTES = 2 << 20
# Bytes of the float32 sums of a program's query rows; what does not fit is another walk over the prefix.
SUM_BYTES = 2 << 20
MAX_PROGRAM_ROWS = 1024
LANES = 128  # of a vector register
VMEM_BYTES = 48 << 20


def tree_attention(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """See `jaxspec.attention.two_part_attention`, its twin.

    It reads no page behind a row's length. The pool's rows may be wider than heads are, see `padded_head_dim`.
    """
    (out,) = _attend(inputs, scoring, is_partial=False)
    return out


def prefix_attention(inputs: AttentionInputs, scoring: Scoring = PLAIN_SCORING) -> Partial:
    """See `jaxspec.attention.prefix_attention`, its twin."""
    total, peak, mass = _attend(prefix_of(inputs), scoring, is_partial=True)
    return Partial(total, peak[..., 0], mass[..., 0])


def _attend(inputs: AttentionInputs, scoring: Scoring, *, is_partial: bool) -> list[jax.Array]:
    """The result, or the sums over all keys that there are."""
    queries, keys, values, pool, layer, block, sinks = inputs
    num_rows, num_kv, num_queries, head_dim = queries.shape
    num_nodes, num_keys = block.positions.shape[1], keys.shape[1]
    page_size, width = pool[0].shape[3:]
    value_dim = scoring.value_dim or head_dim
    sizes = Sizes(
        group=num_queries // num_nodes,
        num_rows=num_rows,
        num_nodes=num_nodes,
        num_keys=num_keys,
        program_rows=_program_rows(num_kv, num_queries, width),
        page_size=page_size,
        step_pages=_step_pages(num_kv * width * queries.dtype.itemsize, page_size),
        value_dim=min(width, -(-value_dim // LANES) * LANES),
    )
    begin, end = walk_range(block, sizes.step_len, scoring.window)
    walk = Walk(jnp.full(1, layer, jnp.int32), block.prefix_len, begin, end, jnp.maximum(block.table, 0))
    lanes = width - head_dim
    own = [(0, 0), (0, 0), (0, sizes.own_steps * sizes.own_len - num_keys), (0, lanes)]
    per_query = functools.partial(jnp.repeat, repeats=sizes.group, axis=1)
    is_latent = scoring.value_dim is not None
    operands = Operands(
        queries=jnp.pad(queries, [(0, 0)] * 3 + [(0, lanes)]),
        words=None if block.ancestors is None else per_query(signed_words(block.ancestors, num_keys, scoring.window)),
        positions=None if scoring.window is None else per_query(block.positions[..., None]),
        sinks=None if sinks is None else sinks[..., None],
        keys=jnp.pad(keys.transpose(0, 2, 1, 3), own),
        values=None if values is None else jnp.pad(values.transpose(0, 2, 1, 3), own),
        key_pool=pool[0],
        value_pool=None if is_latent else pool[1],
    )
    wide, *sums = _call(sizes, scoring, walk, operands, is_partial=is_partial)
    return [wide[..., :value_dim], *sums]


def _program_rows(num_kv: int, num_queries: int, width: int) -> int:
    fitting = SUM_BYTES // (num_kv * width * 4) // TILE * TILE
    return min(num_queries, max(TILE, min(fitting, MAX_PROGRAM_ROWS)))


def _step_pages(token_bytes: int, page_size: int) -> int:
    return max(1, min(STEP_LEN, STEP_BYTES // token_bytes) // page_size)


def _call(sizes: Sizes, scoring: Scoring, walk: Walk, operands: Operands, *, is_partial: bool) -> list[jax.Array]:
    num_rows, num_kv, _, width = operands.queries.shape
    rows, anywhere = sizes.program_rows, pl.BlockSpec(memory_space=pl.ANY)

    def by_queries(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, num_kv, rows, size), lambda row, part, *_: (row, 0, part, 0))

    num_words = 1 if operands.words is None else operands.words.shape[2]
    specs = Operands(
        queries=by_queries(width),
        words=pl.BlockSpec((1, rows, num_words), lambda row, part, *_: (row, part, 0)),
        positions=pl.BlockSpec((1, rows, 1), lambda row, part, *_: (row, part, 0)),
        sinks=pl.BlockSpec((num_kv, rows, 1), lambda row, part, *_: (0, part, 0)),
        keys=anywhere,
        values=anywhere,
        key_pool=anywhere,
        value_pool=anywhere,
    )
    # What a call leaves out is no operand.
    used = [name for name in Operands._fields if getattr(operands, name) is not None]
    slots = pltpu.VMEM((2, num_kv, sizes.step_len, width), operands.queries.dtype)
    column = pltpu.VMEM((num_kv, rows, 1), jnp.float32)
    scratch = Scratch(
        keys=slots,
        values=slots if operands.values is not None else None,
        semaphores=pltpu.SemaphoreType.DMA((2, 2)),
        slot=pltpu.SMEM((1,), jnp.int32),
        total=pltpu.VMEM((num_kv, rows, sizes.value_dim), jnp.float32),
        peak=column,
        mass=column,
    )

    kept = [name for name in Scratch._fields if getattr(scratch, name) is not None]
    # Of the result, or of the sums: how wide a row is, and of what.
    outs = [(sizes.value_dim, operands.queries.dtype)]
    if is_partial:
        outs = [(size, jnp.dtype("float32")) for size in (sizes.value_dim, 1, 1)]

    def kernel(*refs: Any) -> None:
        scalars, rest = refs[: len(walk)], refs[len(walk) :]
        given = Operands(*[None] * len(Operands._fields))._replace(**dict(zip(used, rest)))
        results, rest = rest[len(used) : len(used) + len(outs)], rest[len(used) + len(outs) :]
        held = dict(zip(kept, rest))
        run_program(
            Program(sizes, scoring, Walk(*scalars), given, Scratch(**{"values": held["keys"], **held})), results
        )

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk),
            grid=(num_rows, sizes.num_parts),
            in_specs=[getattr(specs, name) for name in used],
            out_specs=[by_queries(size) for size, _ in outs],
            scratch_shapes=[getattr(scratch, name) for name in kept],
        ),
        out_shape=[jax.ShapeDtypeStruct((*operands.queries.shape[:3], size), dtype) for size, dtype in outs],
        # In order: a program waits for what the one before it fetched.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="tree_attention_tpu",
    )(*walk, *[getattr(operands, name) for name in used])
