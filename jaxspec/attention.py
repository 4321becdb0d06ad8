"""Attention over a paged prefix and a block of new tokens: two parts, merged by log-sum-exp.

The prefix part reads committed pages and masks by length only; the block part reads keys and values that are still
activations and masks by ancestors. Nothing speculative is ever in a page. The prefix part walks the pages in blocks
until the longest row of the batch is covered, so its cost follows real lengths, not the maximum.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.tree import unpack_bits

# Finite, because a row that is all -inf becomes NaN under softmax.
MASKED = -1e30
# Prefix tokens read per step of the walk: one page of the usual size, because XLA's CPU programs first copy what
# several gathered pages are transposed to (measured there: 256 takes 2.6 to 6 times as long).
PREFIX_BLOCK = 64


class TokenBlock(Protocol):
    """Tokens that a model runs together, and what each may attend to."""

    @property
    def positions(self) -> jax.Array:
        """Rotary positions, int32 [B, N]."""
        ...

    def attend(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        pool: tuple[jax.Array, jax.Array] | None,
        layer: int | jax.Array,
        scale: float,
    ) -> jax.Array:
        """Attention of queries [B, N, H, D] over keys and values [B, M, K, D], and the pool's layer if there is one."""
        ...


class Scoring(NamedTuple):
    """What a layer's softmax has beyond the scores, all of it static.

    Attributes:
        window: a token sees so many tokens, itself included; None is all.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None leaves them.
        value_dim: values are the first so many numbers of the keys, which are all that is cached (multi-head latent
            attention with absorbed queries); None where values are arrays of their own.
    """

    window: int | None = None
    soft_cap: float | None = None
    value_dim: int | None = None


PLAIN_SCORING = Scoring()


class Block(NamedTuple):
    """New tokens of every row, and what they may attend to.

    The prefix of row b is its `prefix_len[b]` committed tokens, found through `table`. `ancestors` says which nodes of
    the block each node sees, itself included; None means causal (a chain or a chunk of a prompt).
    """

    positions: jax.Array  # int32 [B, N], absolute
    prefix_len: jax.Array  # int32 [B]
    table: jax.Array  # int32 [B, pages]; -1 where no page is reserved
    ancestors: jax.Array | None = None  # uint32 [B, N, words], over `earlier` nodes then the block's own

    def attend(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array | None,
        pool: tuple[jax.Array, ...] | None,
        layer: int | jax.Array,
        scale: float,
        *,
        kernel: "AttentionKernel | None" = None,
        scoring: Scoring = PLAIN_SCORING,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention of the block over its prefix and itself.

        Args:
            queries: [B, N, H, D]; H = K x G, query heads of one kv head are neighbours.
            keys, values: [B, M, K, D], the earlier nodes' and the block's own; values None with `scoring.value_dim`.
            pool: keys and values, each [L, pages, K, page_size, D]; of keys alone with `scoring.value_dim`.
            layer: which layer of the pool.
            scale: factor on the scores.
            kernel: what computes it; None is `two_part_attention`.
            scoring: what is static about the softmax.
            sinks: float32 [H], scores of a key that every query sees and that has no value.

        Returns:
            [B, N, H, D] in the queries' dtype; D is `scoring.value_dim` where that is set.
        """
        assert pool is not None, "a block has its prefix in pages"
        num_rows, num_nodes, num_heads, _ = queries.shape
        num_kv = keys.shape[2]
        inputs = AttentionInputs(fold(queries * scale, num_kv), keys, values, pool, layer, self)
        if sinks is not None:
            inputs = inputs._replace(sinks=jnp.tile(sinks.reshape(num_kv, -1), (1, num_nodes)))
        out = (kernel or two_part_attention)(inputs, scoring)
        out = out.reshape(num_rows, num_kv, num_nodes, num_heads // num_kv, -1).transpose(0, 2, 1, 3, 4)
        return out.reshape(num_rows, num_nodes, num_heads, -1)


def fold(queries: jax.Array, num_kv: int) -> jax.Array:
    """Queries [B, N, H, D] by kv head: [B, K, N x G, D], the node as the outer index."""
    num_rows, num_nodes, num_heads, _ = queries.shape
    by_head = queries.reshape(num_rows, num_nodes, num_kv, num_heads // num_kv, -1).transpose(0, 2, 1, 3, 4)
    return by_head.reshape(num_rows, num_kv, num_nodes * num_heads // num_kv, -1)


class AttentionInputs(NamedTuple):
    """Arrays that a block's attention is computed from; M is the earlier nodes, then the N new ones."""

    queries: jax.Array  # [B, K, Q, D], already scaled; Q = nodes x query heads per kv head, the node as the outer index
    keys: jax.Array  # [B, M, K, D]
    values: jax.Array | None  # [B, M, K, D]; None where they are part of the keys
    pool: tuple[jax.Array, ...]  # keys and, where there are any, values, each [L, pages, K, page_size, D]
    layer: int | jax.Array  # of the pool
    block: Block  # positions, prefix lengths, table and ancestors
    sinks: jax.Array | None = None  # float32 [K, Q]


# A way to compute a block's attention, with the arguments and the result of `two_part_attention`.
AttentionKernel = Callable[[AttentionInputs, Scoring], jax.Array]


def two_part_attention(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """What XLA compiles on any platform, and what every kernel is compared with.

    Returns:
        [B, K, Q, D] in the queries' dtype.
    """
    prefix = prefix_attention(inputs, scoring)
    if inputs.sinks is not None:
        peak = jnp.broadcast_to(inputs.sinks, prefix.peak.shape)
        prefix = join(prefix, Partial(jnp.zeros_like(prefix.values), peak, jnp.ones_like(peak)))
    return merge(prefix, block_attention(inputs, scoring)).astype(inputs.queries.dtype)


class Partial(NamedTuple):
    """Unnormalised attention over some of the keys; `merge` joins two."""

    values: jax.Array  # float32 [B, K, Q, D], sum of exp(score - peak) * value
    peak: jax.Array  # float32 [B, K, Q]; the log-sum-exp of the scores is peak + log(mass)
    mass: jax.Array  # float32 [B, K, Q], sum of exp(score - peak)


def join(a: Partial, b: Partial) -> Partial:
    """Two parts as one, by log-sum-exp."""
    peak = jnp.maximum(a.peak, b.peak)
    scale_a, scale_b = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    values = a.values * scale_a[..., None] + b.values * scale_b[..., None]
    return Partial(values, peak, a.mass * scale_a + b.mass * scale_b)


def merge(a: Partial, b: Partial) -> jax.Array:
    """Joins two parts and normalises: float32 [B, K, Q, D]."""
    both = join(a, b)
    return both.values / both.mass[..., None]


def capped(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    """Scores within (-soft_cap, soft_cap)."""
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def nearest(visible: jax.Array, window: int | None) -> jax.Array:
    """The last `window` keys of each query in visible [..., M]: a node's ancestors are in order, root first."""
    if window is None:
        return visible
    behind = jnp.cumsum(visible[..., ::-1], axis=-1)[..., ::-1] - visible
    return visible & (behind < window)


def partial_attention(scores: jax.Array, visible: jax.Array, values: jax.Array) -> Partial:
    """Softmax numerator over scores [B, K, Q, S] where `visible` (broadcastable), against values [B, K, S, D]."""
    scores = jnp.where(visible, scores, MASKED)
    peak = jnp.max(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)
    out = jnp.einsum("bkqs,bksd->bkqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return Partial(out, peak, jnp.sum(weights, axis=-1))


def prefix_attention(inputs: AttentionInputs, scoring: Scoring = PLAIN_SCORING) -> Partial:
    """Attends to committed pages alone; a row of length 0 gets mass 0."""
    queries, block = inputs.queries, inputs.block
    key_pool, value_pool = inputs.pool[0], inputs.pool[-1]
    value_dim = scoring.value_dim or value_pool.shape[-1]
    page_size = key_pool.shape[3]
    step_pages = max(1, PREFIX_BLOCK // page_size)
    step_len = step_pages * page_size
    num_rows, num_kv, num_queries, _ = queries.shape
    begin, end = walk_range(block, step_len, scoring.window)
    positions = jnp.repeat(block.positions, num_queries // block.positions.shape[1], axis=1)[:, None, :, None]
    # dynamic_slice clamps at the end, which would shift the last step: pad to whole steps.
    table = jnp.pad(jnp.maximum(block.table, 0), ((0, 0), (0, -block.table.shape[1] % step_pages)))

    def read(pool: jax.Array, pages: jax.Array) -> jax.Array:
        found = pool[inputs.layer, pages]  # [B, step_pages, K, page_size, D]
        return found.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv, step_len, pool.shape[-1])

    def walk(step: jax.Array, carry: Partial) -> Partial:
        pages = jax.lax.dynamic_slice_in_dim(table, step * step_pages, step_pages, axis=1)
        places = step * step_len + jnp.arange(step_len)
        visible = places < block.prefix_len[:, None]
        keys = read(key_pool, pages)
        values = read(value_pool, pages) if scoring.value_dim is None else keys[..., :value_dim]
        # Pages beyond the length may hold anything, and 0 * NaN is NaN.
        values = jnp.where(visible[:, None, :, None], values, 0)
        scores = jnp.einsum("bkqd,bksd->bkqs", queries, keys, preferred_element_type=jnp.float32)
        visible = visible[:, None, None, :]
        if scoring.window is not None:
            visible &= places > positions - scoring.window
        return join(carry, partial_attention(capped(scores, scoring.soft_cap), visible, values))

    shape = (num_rows, num_kv, num_queries)
    empty = Partial(
        jnp.zeros((*shape, value_dim), jnp.float32),
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    return jax.lax.fori_loop(jnp.min(begin), jnp.max(end), walk, empty)


def walk_range(block: Block, step_len: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """First step, and the one behind the last, of each row's walk over its prefix: int32 [B] both."""
    end = (block.prefix_len + step_len - 1) // step_len
    if window is None:
        return jnp.zeros_like(end), end
    # The row's first node sees furthest back.
    first = jnp.maximum(jnp.min(block.positions, axis=1) - window + 1, 0)
    return jnp.minimum(first // step_len, end), end


def block_attention(inputs: AttentionInputs, scoring: Scoring = PLAIN_SCORING) -> Partial:
    """Attends to the block's own nodes, and those before it that are not committed."""
    queries, keys, block = inputs.queries, inputs.keys, inputs.block
    values = keys[..., : scoring.value_dim] if inputs.values is None else inputs.values
    num_nodes, num_keys = block.positions.shape[1], keys.shape[1]
    if block.ancestors is None:
        visible = jnp.tril(jnp.ones((1, num_nodes, num_keys), bool), num_keys - num_nodes)
    else:
        visible = unpack_bits(block.ancestors, num_keys)
    group = queries.shape[2] // num_nodes
    visible = jnp.repeat(nearest(visible, scoring.window), group, axis=1)[:, None]
    scores = jnp.einsum("bkqd,bskd->bkqs", queries, keys, preferred_element_type=jnp.float32)
    return partial_attention(capped(scores, scoring.soft_cap), visible, values.transpose(0, 2, 1, 3))
