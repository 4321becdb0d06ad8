"""Attention over a paged prefix and a block of new tokens on NVIDIA GPUs from Hopper on, in one kernel (Mosaic GPU).

A block of threads is one warpgroup: a row, a kv head, and 64 of the head's query rows, which are the rows of a tensor
core's product. It walks over the prefix, then over the block's own keys, 64 at a time; bulk copies fetch the next step
while the last one is multiplied. All steps share one running softmax, in registers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.attention import MASKED, PLAIN_SCORING, AttentionInputs, Scoring
from jaxspec.tree import WORD_BITS

# Query rows of a block of threads, and keys of a step: what the tensor cores of a warpgroup multiply at once.
TILE = 64


class Sizes(NamedTuple):
    """What is static about one call."""

    group: int  # query heads of one kv head
    num_nodes: int
    num_keys: int  # earlier nodes and the block's own
    head_dim: int
    page_size: int
    is_causal: bool


class Operands(NamedTuple):
    """Arrays of a call, all in the GPU's memory; query rows and keys are padded to whole tiles."""

    layer: Any  # int32 [1]
    length: Any  # int32 [B]
    table: Any  # int32 [B, pages]
    queries: Any  # [B, K, Q, D]
    keys: Any  # [B, K, M, D]
    values: Any  # [B, K, M, D]
    words: Any  # int32 [B, words, Q]; of a causal block zeros that are not read
    key_pool: Any  # [L, pages, K, page_size, D]
    value_pool: Any


class Scratch(NamedTuple):
    """What a block of threads shares."""

    queries: Any  # [TILE, D]; in the end the result
    keys: Any  # [2, TILE, D], two slots that are filled in turn
    values: Any
    query_barrier: Any
    key_barriers: Any  # of each slot
    value_barriers: Any


class Sums(NamedTuple):
    """The running softmax."""

    total: jax.Array  # float32 [TILE, D]
    peak: jax.Array  # float32 [TILE]
    mass: jax.Array  # float32 [TILE]


def tree_attention(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """See `jaxspec.attention.two_part_attention`, its twin.

    Raises:
        NotImplementedError: a window, a soft cap or sinks.
    """
    queries, keys, values, pool, layer, block, sinks = inputs
    if scoring != PLAIN_SCORING or sinks is not None:
        raise NotImplementedError("the kernel for GPUs has no window, soft cap or sinks; use 'xla'")
    num_queries, num_keys, head_dim = queries.shape[2], keys.shape[1], queries.shape[3]
    num_nodes = block.positions.shape[1]
    page_size, width = pool[0].shape[3:]
    sizes = Sizes(num_queries // num_nodes, num_nodes, num_keys, width, page_size, block.ancestors is None)
    more, columns = -num_queries % TILE, (0, width - head_dim)
    own = [(0, 0), (0, 0), (0, -num_keys % TILE), columns]
    if block.ancestors is None:
        words = jnp.zeros((queries.shape[0], 1, num_queries + more), jnp.int32)
    else:
        words = jax.lax.bitcast_convert_type(block.ancestors, jnp.int32).transpose(0, 2, 1)
        words = jnp.pad(jnp.repeat(words, sizes.group, axis=2), [(0, 0), (0, 0), (0, more)])
    operands = Operands(
        layer=jnp.full(1, layer, jnp.int32),
        length=block.prefix_len,
        table=jnp.maximum(block.table, 0),
        queries=jnp.pad(queries, [(0, 0), (0, 0), (0, more), columns]),
        keys=jnp.pad(keys.transpose(0, 2, 1, 3), own),
        values=jnp.pad(values.transpose(0, 2, 1, 3), own),
        words=words,
        key_pool=pool[0],
        value_pool=pool[1],
    )
    return _call(sizes, operands)[:, :, :num_queries, :head_dim]


def _call(sizes: Sizes, operands: Operands) -> jax.Array:
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

    def body(*refs: Any) -> None:
        count = len(Operands._fields)
        _run(sizes, Operands(*refs[:count]), refs[count], Scratch(*refs[count + 1 :]))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(operands.queries.shape, dtype),
        scratch_types=tuple(scratch),
        grid=(num_rows, num_kv, num_queries // TILE),
        grid_names=("row", "head", "part"),
        kernel_name="tree_attention_gpu",
    )(*operands)


def _run(sizes: Sizes, operands: Operands, out: Any, scratch: Scratch) -> None:
    """One block of threads: its walk, and what comes of it."""
    row, head, part = (jax.lax.axis_index(name) for name in ("row", "head", "part"))
    rows = pl.ds(part * TILE, TILE)
    length = operands.length[row]
    end = pl.cdiv(length, TILE)
    last = end + _own_end(sizes, part)
    fetch = functools.partial(_fetch, sizes, operands, scratch, end)
    plgpu.copy_gmem_to_smem(operands.queries.at[row, head, rows], scratch.queries, scratch.query_barrier)
    fetch(jnp.int32(0), jnp.int32(0))
    plgpu.barrier_wait(scratch.query_barrier)

    def step(index: jax.Array, sums: Sums) -> Sums:
        slot = jax.lax.rem(index, 2)

        @pl.when(index + 1 < last)
        def _():
            plgpu.commit_smem()  # every warp is done with the slot that is filled next
            fetch(index + 1, 1 - slot)

        plgpu.barrier_wait(scratch.key_barriers.at[slot])
        plgpu.barrier_wait(scratch.value_barriers.at[slot])
        left = length - index * TILE

        @pl.when((left > 0) & (left < TILE))
        def _():
            # Beyond the length a page may hold anything, and 0 * NaN is NaN.
            tokens = plgpu.broadcasted_iota(jnp.int32, (TILE, sizes.head_dim), 0, layout=plgpu.Layout.WGMMA)
            values = plgpu.load(scratch.values.at[slot], (), layout=plgpu.Layout.WGMMA, optimized=False)
            scratch.values[slot] = jnp.where(tokens < left, values, jnp.zeros_like(values))
            plgpu.commit_smem()

        visible = _visible(sizes, operands, row, part, left, index - end)
        return _add(sums, scratch, slot, visible)

    column = functools.partial(jnp.full, (TILE,), dtype=jnp.float32)
    by_row = lambda array: plgpu.layout_cast(array, plgpu.Layout.WGMMA.reduce(1))  # noqa: E731
    total = plgpu.layout_cast(jnp.zeros((TILE, sizes.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    sums = jax.lax.fori_loop(0, last, step, Sums(total, by_row(column(MASKED)), by_row(column(0.0))))
    result = sums.total / jax.lax.broadcast_in_dim(sums.mass, sums.total.shape, [0])
    scratch.queries[...] = result.astype(out.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.queries, out.at[row, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _own_end(sizes: Sizes, part: jax.Array) -> jax.Array | int:
    """How many steps the walk over the block's own keys takes: a causal part sees none behind its last node."""
    steps = pl.cdiv(sizes.num_keys, TILE)
    if not sizes.is_causal or steps == 1:
        return steps
    nodes = jnp.minimum(pl.cdiv((part + 1) * TILE, sizes.group), sizes.num_nodes)
    return pl.cdiv(nodes + sizes.num_keys - sizes.num_nodes, TILE)


def _fetch(
    sizes: Sizes, operands: Operands, scratch: Scratch, end: jax.Array, index: jax.Array, slot: jax.Array
) -> None:
    """Starts to fetch the keys and values of a step into a slot."""
    row, head = jax.lax.axis_index("row"), jax.lax.axis_index("head")
    targets = ((scratch.keys, scratch.key_barriers), (scratch.values, scratch.value_barriers))

    @pl.when(index < end)
    def _():
        token = index * TILE
        page = operands.table[row, jax.lax.div(token, sizes.page_size)]
        tokens = pl.ds(jax.lax.rem(token, sizes.page_size), TILE)
        for pool, (slots, barriers) in zip((operands.key_pool, operands.value_pool), targets):
            source = pool.at[operands.layer[0], page, head, tokens]
            plgpu.copy_gmem_to_smem(source, slots.at[slot], barriers.at[slot])

    @pl.when(index >= end)
    def _():
        own = pl.ds((index - end) * TILE, TILE)
        for rows, (slots, barriers) in zip((operands.keys, operands.values), targets):
            plgpu.copy_gmem_to_smem(rows.at[row, head, own], slots.at[slot], barriers.at[slot])


def _visible(
    sizes: Sizes, operands: Operands, row: jax.Array, part: jax.Array, left: jax.Array, own_step: jax.Array
) -> jax.Array:
    """Which keys of a step each query row sees: bool [TILE, TILE]; from `own_step` 0 on they are the block's own."""
    shape, layout = (TILE, TILE), plgpu.Layout.WGMMA
    tokens = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    keys = own_step * TILE + tokens
    if sizes.is_causal:
        # Query row r is of node r // group: compare products, not quotients.
        rows = part * TILE + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        own = (keys - (sizes.num_keys - sizes.num_nodes)) * sizes.group <= rows
    else:
        picked = jnp.zeros(shape, jnp.int32)
        for word in range(operands.words.shape[1]):
            column = plgpu.load(
                operands.words.at[row, word, pl.ds(part * TILE, TILE)],
                (),
                layout=plgpu.Layout.WGMMA.reduce(1),
                optimized=False,
            )
            picked = jnp.where(keys >= word * WORD_BITS, jax.lax.broadcast_in_dim(column, shape, [0]), picked)
        own = (jax.lax.shift_right_logical(picked, keys & (WORD_BITS - 1)) & 1) == 1
        own &= keys < sizes.num_keys
    return jnp.where(own_step < 0, tokens < left, own)


def _add(sums: Sums, scratch: Scratch, slot: jax.Array, visible: jax.Array) -> Sums:
    """The sums with the keys and values of a slot."""
    scores = _product(scratch.queries, scratch.keys.at[slot], transpose=True)
    scores = jnp.where(visible, scores, MASKED)
    peak = jnp.maximum(sums.peak, jnp.max(scores, axis=1))
    weights = jnp.exp(scores - jax.lax.broadcast_in_dim(peak, scores.shape, [0]))
    weights = jnp.where(visible, weights, 0.0)
    shrink = jnp.exp(sums.peak - peak)
    mass = sums.mass * shrink + jnp.sum(weights, axis=1)
    total = sums.total * jax.lax.broadcast_in_dim(shrink, sums.total.shape, [0])
    values = scratch.values.at[slot]
    return Sums(total + _product(weights.astype(values.dtype), values, transpose=False), peak, mass)


def _product(left: Any, right: Any, *, transpose: bool) -> jax.Array:
    """The tensor cores' product in float32, of an array or a reference and a reference."""

    def multiply(product: Any) -> jax.Array:
        plgpu.wgmma(product, left, plgpu.transpose_ref(right, (1, 0)) if transpose else right)
        return product[...]

    shape = TILE, right.shape[0 if transpose else 1]
    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
