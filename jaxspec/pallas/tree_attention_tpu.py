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

from jaxspec.attention import AttentionInputs, Scoring, nearest, walk_range
from jaxspec.pallas.tree_attention_walk import TILE, Operands, Program, Scratch, Sizes, Walk, run_program
from jaxspec.tree import pack_bits, unpack_bits

# Keys of a step: enough that fetching them takes longer than starting to, and that they fill the lanes of a score.
STEP_LEN = 256
# Most bytes of a step's keys; values are as many, and there are two steps.
STEP_BYTES = 2 << 20
# Bytes of the float32 sums of a program's query rows; what does not fit is another walk over the prefix.
SUM_BYTES = 2 << 20
MAX_PROGRAM_ROWS = 1024
VMEM_BYTES = 48 << 20


def tree_attention(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """See `jaxspec.attention.two_part_attention`, its twin.

    It reads no page behind a row's length. The pool's rows may be wider than heads are, see `padded_head_dim`.
    """
    queries, keys, values, pool, layer, block, sinks = inputs
    num_rows, num_kv, num_queries, head_dim = queries.shape
    num_nodes, num_keys = block.positions.shape[1], keys.shape[1]
    page_size, width = pool[0].shape[3:]
    sizes = Sizes(
        group=num_queries // num_nodes,
        num_rows=num_rows,
        num_nodes=num_nodes,
        num_keys=num_keys,
        program_rows=_program_rows(num_kv, num_queries, width),
        page_size=page_size,
        step_pages=_step_pages(num_kv * width * queries.dtype.itemsize, page_size),
    )
    begin, end = walk_range(block, sizes.step_len, scoring.window)
    walk = Walk(jnp.full(1, layer, jnp.int32), block.prefix_len, begin, end, jnp.maximum(block.table, 0))
    lanes = width - head_dim
    own = [(0, 0), (0, 0), (0, sizes.own_steps * sizes.own_len - num_keys), (0, lanes)]
    per_query = functools.partial(jnp.repeat, repeats=sizes.group, axis=1)
    operands = Operands(
        queries=jnp.pad(queries, [(0, 0)] * 3 + [(0, lanes)]),
        words=None if block.ancestors is None else per_query(_words(block.ancestors, num_keys, scoring.window)),
        positions=None if scoring.window is None else per_query(block.positions[..., None]),
        sinks=None if sinks is None else sinks[..., None],
        keys=jnp.pad(keys.transpose(0, 2, 1, 3), own),
        values=jnp.pad(values.transpose(0, 2, 1, 3), own),
        key_pool=pool[0],
        value_pool=pool[1],
    )
    return _call(sizes, scoring, walk, operands)[..., :head_dim]


def _program_rows(num_kv: int, num_queries: int, width: int) -> int:
    fitting = SUM_BYTES // (num_kv * width * 4) // TILE * TILE
    return min(num_queries, max(TILE, min(fitting, MAX_PROGRAM_ROWS)))


def _step_pages(token_bytes: int, page_size: int) -> int:
    return max(1, min(STEP_LEN, STEP_BYTES // token_bytes) // page_size)


def _words(ancestors: jax.Array, num_keys: int, window: int | None) -> jax.Array:
    """Ancestor bits within the window, with a sign as the vector unit takes them: int32 [B, N, words]."""
    if window is not None:
        ancestors = pack_bits(nearest(unpack_bits(ancestors, num_keys), window))
    return jax.lax.bitcast_convert_type(ancestors, jnp.int32)


def _call(sizes: Sizes, scoring: Scoring, walk: Walk, operands: Operands) -> jax.Array:
    num_rows, num_kv, _, width = operands.queries.shape
    rows, anywhere = sizes.program_rows, pl.BlockSpec(memory_space=pl.ANY)
    by_queries = pl.BlockSpec((1, num_kv, rows, width), lambda row, part, *_: (row, 0, part, 0))
    num_words = 1 if operands.words is None else operands.words.shape[2]
    specs = Operands(
        queries=by_queries,
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
        values=slots,
        semaphores=pltpu.SemaphoreType.DMA((2, 2)),
        slot=pltpu.SMEM((1,), jnp.int32),
        total=pltpu.VMEM((num_kv, rows, width), jnp.float32),
        peak=column,
        mass=column,
    )

    def kernel(*refs: Any) -> None:
        scalars, rest = refs[: len(walk)], refs[len(walk) :]
        given = Operands(*[None] * len(Operands._fields))._replace(**dict(zip(used, rest)))
        out, kept = rest[len(used)], Scratch(*rest[len(used) + 1 :])
        run_program(Program(sizes, scoring, Walk(*scalars), given, kept), out)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk),
            grid=(num_rows, sizes.num_parts),
            in_specs=[getattr(specs, name) for name in used],
            out_specs=by_queries,
            scratch_shapes=tuple(scratch),
        ),
        out_shape=jax.ShapeDtypeStruct(operands.queries.shape, operands.queries.dtype),
        # In order: a program waits for what the one before it fetched.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="tree_attention_tpu",
    )(*walk, *[getattr(operands, name) for name in used])
