"""Paged caches of committed tokens.

Every kind of cache has one interface, so that layers may differ:

* a layer *extends*: it reads the cache and returns, beside its output, the block's rows as *pending*;
* `commit` writes the accepted path of the pending rows, and nothing else, into the cache.

Pools therefore hold true tokens only. Rejected rows are never written, so nothing is ever rolled back or compacted.
A kind whose state is not a row per token (`jaxspec.delta_cache`) keeps the same two steps: its pending is what a replay
of the accepted path needs. A window needs no kind of its own: pages keep what it has left behind, so that there is
nothing to bring back, and attention does not read it.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax
import jax.numpy as jnp

from jaxspec.attention import PLAIN_SCORING, Block, Scoring, TokenBlock
from jaxspec.pallas import attention_kernel, padded_head_dim


class Accepted(NamedTuple):
    """Which nodes of a block are kept: node `path[b, j]` becomes the token at `prefix_len[b] + j`, for j < count[b]."""

    path: jax.Array  # int32 [B, P]
    count: jax.Array  # int32 [B], 0..P


def wait_for(count: jax.Array, drawn: jax.Array) -> jax.Array:
    """`count` [B], known only once tokens `drawn` [B] were drawn from the outputs of the block to be committed.

    A write must come after the last layer's read of the pool. The pending rows do not depend on that read, and XLA
    keeps to dependencies only: where there is none it copies the whole pool. (It drops a barrier before it decides.)
    Drawn tokens are never negative, so this changes nothing else.
    """
    return jnp.where(drawn >= 0, count, 0)


class CacheSizes(NamedTuple):
    """How large caches are, and for whom."""

    num_pages: int
    page_size: int
    num_rows: int  # slots of requests, for what is kept by row
    dtype: jnp.dtype
    backend: str = "xla"  # what reads and writes pages


@runtime_checkable
class Cache(Protocol):
    """What a layer kind remembers of committed tokens, for all its layers."""

    def commit(self, pending: tuple[jax.Array, ...], block: Block, accepted: Accepted) -> Self:
        """Writes the accepted nodes of `pending` (leaves [L, B, N, ...]); everything else is left as it is."""
        ...

    def take(self, row_ids: jax.Array) -> Self:
        """The cache as rows `row_ids` int32 [b] see it; an id out of range reads some row, and means nothing."""
        ...

    def put(self, row_ids: jax.Array, local: Self) -> Self:
        """Undoes `take`; an id out of range is dropped."""
        ...


def take_caches(caches: Any, row_ids: jax.Array) -> Any:
    """`Cache.take` of every cache in a tree."""
    return jax.tree.map(lambda cache: cache.take(row_ids), caches, is_leaf=_is_cache)


def put_caches(caches: Any, row_ids: jax.Array, local: Any) -> Any:
    """`Cache.put` of every cache in a tree."""
    return jax.tree.map(lambda cache, one: cache.put(row_ids, one), caches, local, is_leaf=_is_cache)


def _is_cache(value: object) -> bool:
    return isinstance(value, Cache)


class Paged:
    """A cache whose pages all rows share: a dispatch sees it whole."""

    def take(self, row_ids: jax.Array) -> Self:
        return self

    def put(self, row_ids: jax.Array, local: Self) -> Self:
        return local


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV(Paged):
    """Keys and values of equal attention layers, in pages that rows own through a page table.

    `backend` says what reads and writes the pages, and with that their layout: D is the head size, rounded up where the
    backend takes whole lanes only (the rest stays 0).
    """

    keys: jax.Array  # [L, pages, K, page_size, D]
    values: jax.Array  # [L, pages, K, page_size, D]
    backend: str = dataclasses.field(default="xla", metadata={"static": True})

    @classmethod
    def zeros(cls, num_layers: int, num_kv_heads: int, head_dim: int, sizes: CacheSizes) -> "PagedKV":
        padded = padded_head_dim(sizes.backend, head_dim)
        shape = (num_layers, sizes.num_pages, num_kv_heads, sizes.page_size, padded)
        return cls(jnp.zeros(shape, sizes.dtype), jnp.zeros(shape, sizes.dtype), sizes.backend)

    def attend(
        self,
        block: TokenBlock,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: int | jax.Array,
        scale: float,
        scoring: Scoring = PLAIN_SCORING,
    ) -> jax.Array:
        """`Block.attend` over these pages, by the backend's kernel."""
        assert isinstance(block, Block), "only a block has its prefix in pages"
        pool, kernel = (self.keys, self.values), attention_kernel(self.backend)
        return block.attend(queries, keys, values, pool, layer, scale, kernel=kernel, scoring=scoring)

    def commit(self, pending: tuple[jax.Array, ...], block: Block, accepted: Accepted) -> "PagedKV":
        """Writes accepted keys and values (pending leaves [L, B, N, K, D]) behind each row's prefix."""
        if self.backend == "pallas_tpu":
            from jaxspec.pallas.commit_tpu import commit_rows
            from jaxspec.pallas.split import split_commit

            write = split_commit(commit_rows)
        else:
            write = scatter_rows
        keys, values = write((self.keys, self.values), pending, block, accepted)
        return PagedKV(keys, values, self.backend)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLatent(Paged):
    """One latent row per token of equal layers of latent attention, in pages: a key and, in its beginning, a value.

    To attention it is one kv head that all query heads share, whose values are its keys: nothing is stored twice.
    """

    rows: jax.Array  # [L, pages, 1, page_size, D]
    backend: str = dataclasses.field(default="xla", metadata={"static": True})

    @classmethod
    def zeros(cls, num_layers: int, width: int, sizes: CacheSizes) -> "PagedLatent":
        padded = padded_head_dim(sizes.backend, width)
        shape = (num_layers, sizes.num_pages, 1, sizes.page_size, padded)
        return cls(jnp.zeros(shape, sizes.dtype), sizes.backend)

    def attend(
        self, block: TokenBlock, queries: jax.Array, rows: jax.Array, layer: int | jax.Array, scale: float
    ) -> jax.Array:
        """Attention of queries [B, N, H, D] over these pages and the block's rows [B, M, 1, D]: [B, N, H, D]."""
        assert isinstance(block, Block), "only a block has its prefix in pages"
        kernel = attention_kernel(self.backend)
        return block.attend(queries, rows, rows, (self.rows, self.rows), layer, scale, kernel=kernel)

    def commit(self, pending: tuple[jax.Array, ...], block: Block, accepted: Accepted) -> "PagedLatent":
        """Writes accepted rows (the pending leaf [L, B, N, 1, D]) behind each row's prefix."""
        (rows,) = pending
        missing = self.rows.shape[-1] - rows.shape[-1]
        padded = jnp.pad(rows, [(0, 0)] * 4 + [(0, missing)])
        return PagedLatent(scatter_rows((self.rows,), (padded,), block, accepted)[0], self.backend)


def scatter_rows(
    pool: tuple[jax.Array, ...], pending: tuple[jax.Array, ...], block: Block, accepted: Accepted
) -> tuple[jax.Array, ...]:
    """What XLA compiles on any platform, and what every kernel is compared with.

    Args:
        pool: keys and values, or what else there is of a token, each [L, pages, K, page_size, D].
        pending: their rows of the block's nodes, each [L, B, N, K, D].
        block: table and prefix lengths.
        accepted: which nodes become the tokens behind each prefix; positions without a page are dropped.

    Returns:
        The new pools.
    """
    num_pages, page_size = pool[0].shape[1], pool[0].shape[3]
    offsets = jnp.arange(accepted.path.shape[1])
    positions = block.prefix_len[:, None] + offsets
    column = positions // page_size
    page = jnp.take_along_axis(block.table, column, axis=1, mode="fill", fill_value=-1)
    kept = (offsets < accepted.count[:, None]) & (page >= 0)
    # Out of range drops the write; a negative index would wrap to the last page.
    page = jnp.where(kept, page, num_pages)
    slot = positions % page_size

    def write(pool: jax.Array, rows: jax.Array) -> jax.Array:
        chosen = jnp.take_along_axis(rows, accepted.path[None, :, :, None, None], axis=2)
        # Two advanced indices around a slice put their axes first: [B, P, L, K, D].
        return pool.at[:, page, :, slot].set(chosen.transpose(1, 2, 0, 3, 4), mode="drop")

    return tuple(write(one, rows) for one, rows in zip(pool, pending, strict=True))
