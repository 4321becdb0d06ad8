"""One block of threads of the attention kernel for GPUs: a warpgroup's walk over a prefix and a block's own keys."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.attention import MASKED, Scoring, capped
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
    scoring: Scoring

    @property
    def own_steps(self) -> int:
        """Steps behind the prefix: one also where there are no own keys, so that every walk has one to fetch."""
        return max(1, pl.cdiv(self.num_keys, TILE))


class Operands(NamedTuple):
    """Arrays of a call, all in the GPU's memory; query rows and keys are padded to whole tiles."""

    layer: Any  # int32 [1]
    length: Any  # int32 [B]
    begin: Any  # int32 [B], first step of the walk over the prefix
    table: Any  # int32 [B, pages]
    queries: Any  # [B, K, Q, D]
    words: Any  # int32 [B, words, Q], or None for a causal block
    positions: Any  # int32 [B, Q], or None without a window
    sinks: Any  # float32 [K, Q], or None
    keys: Any  # [B, K, M, D]
    values: Any  # [B, K, M, D]
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


def run_warpgroup(sizes: Sizes, operands: Operands, outs: Sequence[Any], scratch: Scratch) -> None:
    """One block of threads: its walk, and what comes of it."""
    row, head, part = (jax.lax.axis_index(name) for name in ("row", "head", "part"))
    rows = pl.ds(part * TILE, TILE)
    length = operands.length[row]
    begin, end = operands.begin[row], pl.cdiv(length, TILE)
    last = end + _own_end(sizes, part, is_causal=operands.words is None)
    fetch = functools.partial(_fetch, sizes, operands, scratch, end)
    plgpu.copy_gmem_to_smem(operands.queries.at[row, head, rows], scratch.queries, scratch.query_barrier)
    fetch(begin, jnp.int32(0))
    plgpu.barrier_wait(scratch.query_barrier)

    def step(index: jax.Array, sums: Sums) -> Sums:
        slot = jax.lax.rem(index - begin, 2)

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
        return _add(sums, scratch, slot, visible, sizes.scoring.soft_cap)

    sums = jax.lax.fori_loop(begin, last, step, _start_sums(sizes, operands, head, rows))
    if len(outs) > 1:
        for out, result in zip(outs, sums):
            out[row, head, rows] = result
        return
    result = sums.total / jax.lax.broadcast_in_dim(sums.mass, sums.total.shape, [0])
    scratch.queries[...] = result.astype(scratch.queries.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.queries, outs[0].at[row, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _start_sums(sizes: Sizes, operands: Operands, head: jax.Array, rows: Any) -> Sums:
    """Sums over no key, or over the sink alone."""

    def column(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    total = plgpu.layout_cast(jnp.zeros((TILE, sizes.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    if operands.sinks is None:
        return Sums(total, column(MASKED), column(0.0))
    return Sums(total, _of_rows(operands.sinks.at[head, rows]), column(1.0))


def _of_rows(ref: Any) -> jax.Array:
    """One number of each query row, beside the rows of a product."""
    return plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _own_end(sizes: Sizes, part: jax.Array, *, is_causal: bool) -> jax.Array | int:
    """How many steps the walk over the block's own keys takes: a causal part sees none behind its last node."""
    if not is_causal or sizes.own_steps == 1:
        return sizes.own_steps
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
    window, rows = sizes.scoring.window, pl.ds(part * TILE, TILE)
    tokens = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    keys = own_step * TILE + tokens
    prefix = tokens < left
    if window is not None:
        positions = jax.lax.broadcast_in_dim(_of_rows(operands.positions.at[row, rows]), shape, [0])
        prefix &= tokens + (operands.length[row] - left) > positions - window
    if operands.words is None:
        # Query row r is of node r // group: compare products, not quotients.
        query_rows = part * TILE + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        behind = (keys - (sizes.num_keys - sizes.num_nodes)) * sizes.group
        own = behind <= query_rows
        if window is not None:
            own &= behind + window * sizes.group > query_rows
    else:
        picked = jnp.zeros(shape, jnp.int32)
        for word in range(operands.words.shape[1]):
            column = jax.lax.broadcast_in_dim(_of_rows(operands.words.at[row, word, rows]), shape, [0])
            picked = jnp.where(keys >= word * WORD_BITS, column, picked)
        own = (jax.lax.shift_right_logical(picked, keys & (WORD_BITS - 1)) & 1) == 1
        own &= keys < sizes.num_keys
    return jnp.where(own_step < 0, prefix, own)


def _add(sums: Sums, scratch: Scratch, slot: jax.Array, visible: jax.Array, soft_cap: float | None) -> Sums:
    """The sums with the keys and values of a slot."""
    scores = capped(_product(scratch.queries, scratch.keys.at[slot], transpose=True), soft_cap)
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
