"""Attention over a paged prefix and a block of new tokens on TPUs, in one kernel (Mosaic).

Rows run one after the other. Each fetches its prefix a few pages at a time, the next pages (of this row or of the next
one that has a prefix) while it computes with the last, and then attends to its block, whose keys and values are still
activations and whose mask is a few packed words a node. All parts share one running softmax.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import MASKED, Block, Scoring, capped, nearest, walk_range
from jaxspec.tree import WORD_BITS, pack_bits, unpack_bits

# Prefix tokens that are fetched together.
STEP_LEN = 256
# Bytes of the float32 sums of one block of query rows; what does not fit is another pass over the prefix.
SUM_BYTES = 2 << 20
MAX_BLOCK_ROWS = 1024
# Rows of a block of queries: whole tiles of every dtype.
ROW_TILE = 32
VMEM_BYTES = 48 << 20


class Sizes(NamedTuple):
    """What is static about one call."""

    group: int  # query heads of one kv head
    num_rows: int
    num_nodes: int
    num_keys: int  # earlier nodes and the block's own
    block_rows: int  # query rows that are computed together
    page_size: int
    step_pages: int

    @property
    def step_len(self) -> int:
        return self.step_pages * self.page_size


class Walk(NamedTuple):
    """Scalars of every row's walk over its prefix."""

    layer: Any  # int32 [1]
    length: Any  # int32 [B]
    begin: Any  # int32 [B], first step
    end: Any  # int32 [B], behind the last step
    following: Any  # int32 [B + 1], the first row from here on that has a step, B where there is none
    table: Any  # int32 [B, pages]


class Inputs(NamedTuple):
    """Arrays of a call; a program sees one row of them, and `block_rows` of the query rows Q."""

    queries: Any  # [B, K, Q, D]
    keys: Any  # [B, K, M, D]
    values: Any  # [B, K, M, D]
    words: Any  # int32 [B, Q, words], or None for a causal block
    positions: Any  # int32 [B, Q, 1], or None without a window
    sinks: Any  # float32 [K, Q, 1], or None
    key_pool: Any  # [L, pages, K, page_size, D], left where it is
    value_pool: Any


class Scratch(NamedTuple):
    """What programs keep on the core; the pages and the slot outlive a program, because it fetches for the next."""

    key_pages: Any  # [2, K, step_len, D], two slots that are filled in turn
    value_pages: Any
    semaphores: Any  # [2, 2], of each slot for keys and values
    slot: Any  # int32 [1], the slot that is computed with next
    total: Any  # float32 [K, block_rows, D]
    peak: Any  # float32 [K, block_rows, 1]
    mass: Any  # float32 [K, block_rows, 1]


def tree_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pool: tuple[jax.Array, jax.Array],
    layer: int | jax.Array,
    block: Block,
    scoring: Scoring,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `jaxspec.attention.two_part_attention`, its twin.

    It reads no page behind a row's length. The pool's rows may be wider than heads are, see `padded_head_dim`.
    """
    num_rows, num_kv, num_queries, head_dim = queries.shape
    lanes = [(0, 0)] * 3 + [(0, pool[0].shape[4] - head_dim)]
    queries, keys, values = (jnp.pad(array, lanes) for array in (queries, keys, values))
    num_nodes, page_size = block.positions.shape[1], pool[0].shape[3]
    sizes = Sizes(
        group=num_queries // num_nodes,
        num_rows=num_rows,
        num_nodes=num_nodes,
        num_keys=keys.shape[1],
        block_rows=_block_rows(num_kv, num_queries, values.shape[3]),
        page_size=page_size,
        step_pages=max(1, STEP_LEN // page_size),
    )
    begin, end = walk_range(block, sizes.step_len, scoring.window)
    rows = jnp.arange(num_rows + 1, dtype=jnp.int32)
    found = jnp.where(jnp.append(end > begin, True), rows, num_rows)
    following = jax.lax.cummin(found, reverse=True)
    walk = Walk(jnp.full(1, layer, jnp.int32), block.prefix_len, begin, end, following, jnp.maximum(block.table, 0))
    per_query = functools.partial(jnp.repeat, repeats=sizes.group, axis=1)
    inputs = Inputs(
        queries,
        keys.transpose(0, 2, 1, 3),
        values.transpose(0, 2, 1, 3),
        None if block.ancestors is None else per_query(_signed_words(block.ancestors, sizes.num_keys, scoring.window)),
        None if scoring.window is None else per_query(block.positions[..., None]),
        None if sinks is None else sinks[..., None],
        *pool,
    )
    return _call(sizes, scoring, walk, inputs)[..., :head_dim]


def _block_rows(num_kv: int, num_queries: int, head_dim: int) -> int:
    fitting = SUM_BYTES // (num_kv * head_dim * 4) // ROW_TILE * ROW_TILE
    return min(num_queries, max(ROW_TILE, min(fitting, MAX_BLOCK_ROWS)))


def _signed_words(ancestors: jax.Array, num_keys: int, window: int | None) -> jax.Array:
    """Ancestor bits within the window, as the vector unit takes them: int32 [B, N, words]."""
    if window is not None:
        ancestors = pack_bits(nearest(unpack_bits(ancestors, num_keys), window))
    return jax.lax.bitcast_convert_type(ancestors, jnp.int32)


def _call(sizes: Sizes, scoring: Scoring, walk: Walk, inputs: Inputs) -> jax.Array:
    num_rows, num_kv, num_queries, head_dim = inputs.queries.shape
    block_rows = sizes.block_rows

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda row, _, *walk: (row, *[0] * len(shape)))

    by_queries = pl.BlockSpec((1, num_kv, block_rows, head_dim), lambda row, part, *walk: (row, 0, part, 0))
    specs = Inputs(
        queries=by_queries,
        keys=of_row(*inputs.keys.shape[1:]),
        values=of_row(*inputs.values.shape[1:]),
        words=pl.BlockSpec((1, block_rows, _width(inputs.words)), lambda row, part, *walk: (row, part, 0)),
        positions=pl.BlockSpec((1, block_rows, 1), lambda row, part, *walk: (row, part, 0)),
        sinks=pl.BlockSpec((num_kv, block_rows, 1), lambda row, part, *walk: (0, part, 0)),
        key_pool=pl.BlockSpec(memory_space=pl.ANY),
        value_pool=pl.BlockSpec(memory_space=pl.ANY),
    )
    # What a call leaves out is no operand.
    used = [name for name in Inputs._fields if getattr(inputs, name) is not None]
    pages = pltpu.VMEM((2, num_kv, sizes.step_len, head_dim), inputs.key_pool.dtype)
    column = pltpu.VMEM((num_kv, block_rows, 1), jnp.float32)
    scratch = Scratch(
        key_pages=pages,
        value_pages=pages,
        semaphores=pltpu.SemaphoreType.DMA((2, 2)),
        slot=pltpu.SMEM((1,), jnp.int32),
        total=pltpu.VMEM((num_kv, block_rows, head_dim), jnp.float32),
        peak=column,
        mass=column,
    )

    def kernel(*refs: Any) -> None:
        scalars, rest = refs[: len(walk)], refs[len(walk) :]
        given = Inputs(*[None] * len(Inputs._fields))._replace(**dict(zip(used, rest)))
        _program(sizes, scoring, Walk(*scalars), given, rest[len(used)], Scratch(*rest[len(used) + 1 :]))

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk),
            grid=(num_rows, pl.cdiv(num_queries, block_rows)),
            in_specs=[getattr(specs, name) for name in used],
            out_specs=by_queries,
            scratch_shapes=tuple(scratch),
        ),
        out_shape=jax.ShapeDtypeStruct(inputs.queries.shape, inputs.queries.dtype),
        # In order: a program waits for what the one before it fetched.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="tree_attention_tpu",
    )(*walk, *[getattr(inputs, name) for name in used])


def _width(words: Any) -> int:
    return 1 if words is None else words.shape[2]


def _program(sizes: Sizes, scoring: Scoring, walk: Walk, inputs: Inputs, out: Any, scratch: Scratch) -> None:
    """One row's queries, `block_rows` of them."""
    row, part = pl.program_id(0), pl.program_id(1)
    _start(inputs.sinks, scratch)

    @pl.when((row == 0) & (part == 0))
    def _():
        first = walk.following[0]
        scratch.slot[0] = 0

        @pl.when(first < sizes.num_rows)
        def _():
            _each_page(sizes, walk, inputs, scratch, (first, walk.begin[first], 0), lambda copy: copy.start())

    def step(index: jax.Array, carry: None) -> None:
        slot = scratch.slot[0]
        is_last = index + 1 == walk.end[row]
        again = is_last & (part + 1 < pl.num_programs(1))
        next_row = jnp.where(is_last & ~again, walk.following[row + 1], row)
        next_index = jnp.where(is_last, walk.begin[jnp.minimum(next_row, sizes.num_rows - 1)], index + 1)

        @pl.when(next_row < sizes.num_rows)
        def _():
            _each_page(sizes, walk, inputs, scratch, (next_row, next_index, 1 - slot), lambda copy: copy.start())

        _each_page(sizes, walk, inputs, scratch, (row, index, slot), lambda copy: copy.wait())
        _attend_prefix(sizes, scoring, walk.length[row], inputs, scratch, (index, slot))
        scratch.slot[0] = 1 - slot

    jax.lax.fori_loop(walk.begin[row], walk.end[row], step, None)
    _attend_block(sizes, scoring, part * sizes.block_rows, inputs, scratch)

    def finish(head: jax.Array, carry: None) -> None:
        out[0, head] = (scratch.total[head] / scratch.mass[head]).astype(out.dtype)

    jax.lax.fori_loop(0, out.shape[1], finish, None)


def _start(sinks: Any, scratch: Scratch) -> None:
    """Sums over no key, or over the sink alone."""
    scratch.total[...] = jnp.zeros_like(scratch.total)
    scratch.peak[...] = jnp.full_like(scratch.peak, MASKED) if sinks is None else sinks[...]
    scratch.mass[...] = jnp.full_like(scratch.mass, 0 if sinks is None else 1)


def _each_page(
    sizes: Sizes,
    walk: Walk,
    inputs: Inputs,
    scratch: Scratch,
    place: tuple[jax.Array | int, ...],
    act: Callable[[Any], None],
) -> None:
    """Does something with the copy of every page of one step, keys and values; a place is (row, step, slot)."""
    row, step, slot = place
    first = step * sizes.step_pages
    count = jnp.minimum(pl.cdiv(walk.length[row], sizes.page_size) - first, sizes.step_pages)

    def copy(index: jax.Array, carry: None) -> None:
        page = walk.table[row, first + index]
        tokens = pl.ds(pl.multiple_of(index * sizes.page_size, sizes.page_size), sizes.page_size)
        pairs = ((inputs.key_pool, scratch.key_pages), (inputs.value_pool, scratch.value_pages))
        for kind, (pool, pages) in enumerate(pairs):
            target = pages.at[slot, :, tokens]
            act(pltpu.make_async_copy(pool.at[walk.layer[0], page], target, scratch.semaphores.at[slot, kind]))

    jax.lax.fori_loop(0, count, copy, None)


def _attend_prefix(
    sizes: Sizes, scoring: Scoring, length: jax.Array, inputs: Inputs, scratch: Scratch, place: tuple[Any, Any]
) -> None:
    """Adds one step of the prefix to the sums; a place is (step, slot)."""
    index, slot = place
    left = length - index * sizes.step_len  # tokens of this step and those behind it

    @pl.when(left < sizes.step_len)
    def _():
        # Beyond the length a page may hold anything, and 0 * NaN is NaN.
        values = scratch.value_pages[slot]
        tokens = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        scratch.value_pages[slot] = jnp.where(tokens < left, values, jnp.zeros_like(values))

    shape = (sizes.block_rows, sizes.step_len)
    tokens = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    visible = tokens < left
    if scoring.window is not None:
        visible &= tokens + index * sizes.step_len > inputs.positions[0] - scoring.window

    def attend(head: jax.Array, carry: None) -> None:
        keys, values = scratch.key_pages[slot, head], scratch.value_pages[slot, head]
        _add(scoring, scratch, head, inputs.queries[0, head], keys, values, visible)

    jax.lax.fori_loop(0, inputs.queries.shape[1], attend, None)


def _attend_block(sizes: Sizes, scoring: Scoring, first: jax.Array, inputs: Inputs, scratch: Scratch) -> None:
    """Adds the block's own keys to the sums; `first` is the number of the program's first query row."""
    visible = _visible_in_block(sizes, scoring, first, inputs.words)

    def attend(head: jax.Array, carry: None) -> None:
        _add(scoring, scratch, head, inputs.queries[0, head], inputs.keys[0, head], inputs.values[0, head], visible)

    jax.lax.fori_loop(0, inputs.queries.shape[1], attend, None)


def _visible_in_block(sizes: Sizes, scoring: Scoring, first: jax.Array, words: Any) -> jax.Array:
    """Which of the block's keys each query row sees: bool [block_rows, M]."""
    shape = (sizes.block_rows, sizes.num_keys)
    keys = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    if words is None:
        # Query row r is of node r // group: compare products, not quotients.
        own = (keys - (sizes.num_keys - sizes.num_nodes)) * sizes.group
        rows = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        visible = own <= rows
        return visible if scoring.window is None else visible & (own + scoring.window * sizes.group > rows)
    picked = jnp.broadcast_to(words[0, :, :1], shape)
    for word in range(1, words.shape[2]):
        picked = jnp.where(keys >= word * WORD_BITS, words[0, :, word : word + 1], picked)
    return (jax.lax.shift_right_logical(picked, keys % WORD_BITS) & 1) == 1


def _add(
    scoring: Scoring,
    scratch: Scratch,
    head: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
) -> None:
    """Adds keys [S, D] and values to the running sums of one head's queries [block_rows, D]."""
    scores = jax.lax.dot_general(queries, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    scores = jnp.where(visible, capped(scores, scoring.soft_cap), MASKED)
    old = scratch.peak[head]
    peak = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
    shrink = jnp.exp(old - peak)
    scratch.peak[head] = peak
    scratch.mass[head] = scratch.mass[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    added = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    scratch.total[head] = scratch.total[head] * shrink + added
