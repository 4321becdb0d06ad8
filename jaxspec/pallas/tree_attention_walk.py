"""One program of the attention kernel for TPUs: a walk over a row's prefix and over its block's own keys.

Programs run one after the other. While a step of a walk is computed the next one is being fetched, be it the same
program's or the first of the next. All steps share one running softmax.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import MASKED, Scoring, capped
from jaxspec.tree import WORD_BITS

# Tokens of whole tiles of every dtype, for blocks of queries and of own keys.
TILE = 32


class Sizes(NamedTuple):
    """What is static about one call."""

    group: int  # query heads of one kv head
    num_rows: int
    num_nodes: int
    num_keys: int  # earlier nodes and the block's own
    program_rows: int  # query rows of a program
    page_size: int
    step_pages: int
    value_dim: int  # numbers of a value, of a latent pool the first of a key, in whole vectors

    @property
    def step_len(self) -> int:
        """Prefix tokens of a step."""
        return self.step_pages * self.page_size

    @property
    def own_len(self) -> int:
        """Own keys of a step."""
        return min(self.step_len, max(TILE, pl.cdiv(self.num_keys, TILE) * TILE))

    @property
    def own_steps(self) -> int:
        """Steps behind the prefix: one also where there are no own keys, so that every program has one to fetch."""
        return max(1, pl.cdiv(self.num_keys, self.own_len))

    @property
    def num_parts(self) -> int:
        """Programs of a row."""
        return pl.cdiv(self.num_nodes * self.group, self.program_rows)


class Walk(NamedTuple):
    """Scalars of every row's walk; the block's own steps come behind `end`."""

    layer: Any  # int32 [1]
    length: Any  # int32 [B]
    begin: Any  # int32 [B], first step of the prefix
    end: Any  # int32 [B], behind its last step
    table: Any  # int32 [B, pages]


class Operands(NamedTuple):
    """Arrays of a call; a program sees `program_rows` of a row's query rows Q, and fetches of the last four itself."""

    queries: Any  # [B, K, Q, D]
    words: Any  # int32 [B, Q, words], or None for a causal block
    positions: Any  # int32 [B, Q, 1], or None without a window
    sinks: Any  # float32 [K, Q, 1], or None
    keys: Any  # [B, K, own_steps * own_len, D]
    values: Any  # as keys, or None where values are part of them
    key_pool: Any  # [L, pages, K, page_size, D]
    value_pool: Any  # as key_pool, or None


class Scratch(NamedTuple):
    """What programs keep on the core; the first four outlive a program, because it fetches for the next."""

    keys: Any  # [2, K, step_len, D], two slots that are filled in turn
    values: Any  # as keys; the very same where values are part of them
    semaphores: Any  # [2, 2], of each slot for keys and values
    slot: Any  # int32 [1], the slot that is computed with next
    total: Any  # float32 [K, program_rows, value_dim]
    peak: Any  # float32 [K, program_rows, 1]
    mass: Any  # float32 [K, program_rows, 1]


class Program(NamedTuple):
    """What the functions of one program share."""

    sizes: Sizes
    scoring: Scoring
    walk: Walk
    operands: Operands
    scratch: Scratch


def run_program(program: Program, outs: Sequence[Any]) -> None:
    """One program: its walk, and what comes of it.

    Args:
        program: what its functions share.
        outs: the normalised result [1, K, program_rows, value_dim]; or the sums as they are, by the fields of
            `Partial`.
    """
    sizes, walk, scratch = program.sizes, program.walk, program.scratch
    row, part = pl.program_id(0), pl.program_id(1)
    _start_sums(program.operands.sinks, scratch)

    @pl.when((row == 0) & (part == 0))
    def _():
        scratch.slot[0] = 0
        _each_copy(program, 0, walk.begin[0], 0, lambda copy: copy.start())

    last = walk.end[row] + _own_end(sizes, program.operands.words, part) - 1

    def step(index: jax.Array, carry: None) -> None:
        slot = scratch.slot[0]
        is_done = index == last
        next_row = jnp.where(is_done & (part == sizes.num_parts - 1), row + 1, row)

        @pl.when(next_row < sizes.num_rows)
        def _():
            next_index = jnp.where(is_done, walk.begin[jnp.minimum(next_row, sizes.num_rows - 1)], index + 1)
            _each_copy(program, next_row, next_index, 1 - slot, lambda copy: copy.start())

        _each_copy(program, row, index, slot, lambda copy: copy.wait())
        pl.when(index < walk.end[row])(functools.partial(_attend_prefix, program, row, index, slot))
        pl.when(index >= walk.end[row])(functools.partial(_attend_own, program, part, index - walk.end[row], slot))
        scratch.slot[0] = 1 - slot

    jax.lax.fori_loop(walk.begin[row], last + 1, step, None)

    def finish(head: jax.Array, carry: None) -> None:
        total, peak, mass = scratch.total[head], scratch.peak[head], scratch.mass[head]
        for out, result in zip(outs, (total / mass,) if len(outs) == 1 else (total, peak, mass)):
            out[0, head] = result.astype(out.dtype)

    jax.lax.fori_loop(0, outs[0].shape[1], finish, None)


def _start_sums(sinks: Any, scratch: Scratch) -> None:
    """Sums over no key, or over the sink alone."""
    scratch.total[...] = jnp.zeros_like(scratch.total)
    scratch.peak[...] = jnp.full_like(scratch.peak, MASKED) if sinks is None else sinks[...]
    scratch.mass[...] = jnp.full_like(scratch.mass, 0 if sinks is None else 1)


def _own_end(sizes: Sizes, words: Any, part: jax.Array) -> jax.Array | int:
    """How many steps the walk over the block's own keys takes: a causal part sees none behind its last node."""
    if words is not None or sizes.own_steps == 1:
        return sizes.own_steps
    nodes = jnp.minimum(pl.cdiv((part + 1) * sizes.program_rows, sizes.group), sizes.num_nodes)
    return pl.cdiv(nodes + sizes.num_keys - sizes.num_nodes, sizes.own_len)


def _each_copy(program: Program, row: Any, index: Any, slot: Any, act: Callable[[Any], None]) -> None:
    """Does something with every copy of a step into a slot: keys and values of pages, or of the block."""
    sizes, walk, operands, scratch = program.sizes, program.walk, program.operands, program.scratch

    def copy(kind: int, source: Any, start: Any, size: int) -> None:
        target = (scratch.keys, scratch.values)[kind].at[slot, :, pl.ds(start, size)]
        act(pltpu.make_async_copy(source, target, scratch.semaphores.at[slot, kind]))

    def copy_page(place: jax.Array, carry: None) -> None:
        page = walk.table[row, index * sizes.step_pages + place]
        start = pl.multiple_of(place * sizes.page_size, sizes.page_size)
        for kind, pool in enumerate((operands.key_pool, operands.value_pool)):
            if pool is not None:
                copy(kind, pool.at[walk.layer[0], page], start, sizes.page_size)

    @pl.when(index < walk.end[row])
    def _():
        left = pl.cdiv(walk.length[row], sizes.page_size) - index * sizes.step_pages
        jax.lax.fori_loop(0, jnp.minimum(left, sizes.step_pages), copy_page, None)

    @pl.when(index >= walk.end[row])
    def _():
        own = pl.ds(pl.multiple_of((index - walk.end[row]) * sizes.own_len, sizes.own_len), sizes.own_len)
        for kind, rows in enumerate((operands.keys, operands.values)):
            if rows is not None:
                copy(kind, rows.at[row, :, own], 0, sizes.own_len)


def _attend_prefix(program: Program, row: jax.Array, index: jax.Array, slot: jax.Array) -> None:
    """Adds one step of the prefix to the sums."""
    sizes, scratch, window = program.sizes, program.scratch, program.scoring.window
    left = program.walk.length[row] - index * sizes.step_len  # tokens of this step and those behind it

    @pl.when(left < sizes.step_len)
    def _():
        # Beyond the length a page may hold anything, and 0 * NaN is NaN.
        values = scratch.values[slot]
        tokens = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        scratch.values[slot] = jnp.where(tokens < left, values, jnp.zeros_like(values))

    tokens = jax.lax.broadcasted_iota(jnp.int32, (sizes.program_rows, sizes.step_len), 1)
    visible = tokens < left
    if window is not None:
        visible &= tokens + index * sizes.step_len > program.operands.positions[0] - window
    _add(program, slot, visible)


def _attend_own(program: Program, part: jax.Array, step: jax.Array, slot: jax.Array) -> None:
    """Adds one step of the block's own keys to the sums."""
    sizes, words, window = program.sizes, program.operands.words, program.scoring.window
    shape = (sizes.program_rows, sizes.own_len)
    keys = step * sizes.own_len + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    if words is None:
        # Query row r is of node r // group: compare products, not quotients.
        own = (keys - (sizes.num_keys - sizes.num_nodes)) * sizes.group
        rows = part * sizes.program_rows + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        visible = own <= rows
        if window is not None:
            visible &= own + window * sizes.group > rows
    else:
        picked = jnp.broadcast_to(words[0, :, :1], shape)
        for word in range(1, words.shape[2]):
            picked = jnp.where(keys >= word * WORD_BITS, words[0, :, word : word + 1], picked)
        visible = (jax.lax.shift_right_logical(picked, keys % WORD_BITS) & 1 == 1) & (keys < sizes.num_keys)
    _add(program, slot, visible)


def _add(program: Program, slot: jax.Array, visible: jax.Array) -> None:
    """Adds the first keys and values of a slot, as many as `visible` [program_rows, S] is wide, to the sums."""
    scratch, size = program.scratch, visible.shape[1]
    # Products of narrow numbers are exact as they are, and more passes over them than one are refused.
    precision = None if scratch.keys.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def add(head: jax.Array, carry: None) -> None:
        queries, keys = program.operands.queries[0, head], scratch.keys[slot, head, :size]
        values = scratch.values[slot, head, :size, : program.sizes.value_dim]
        scores = product(queries, keys, (((1,), (1,)), ((), ())))
        scores = jnp.where(visible, capped(scores, program.scoring.soft_cap), MASKED)
        old = scratch.peak[head]
        peak = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - peak), 0.0)
        shrink = jnp.exp(old - peak)
        scratch.peak[head] = peak
        scratch.mass[head] = scratch.mass[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        added = product(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
        scratch.total[head] = scratch.total[head] * shrink + added

    jax.lax.fori_loop(0, program.operands.queries.shape[1], add, None)
