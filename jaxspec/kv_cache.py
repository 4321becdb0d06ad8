"""Paged caches of committed tokens.

Every kind of cache has one interface, so that layers may differ:

* a layer *extends*: it reads the cache and returns, beside its output, the block's rows as *pending*;
* `commit` writes the accepted path of the pending rows, and nothing else, into the cache.

Pools therefore hold true tokens only. Rejected rows are never written, so nothing is ever rolled back or compacted.
A kind whose state is not a row per token (a recurrent state, a window) keeps the same two steps: its pending is what
a replay of the accepted path needs.
"""

import dataclasses
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from jaxspec.attention import Block, TokenBlock
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


class Cache(Protocol):
    """What a layer kind remembers of committed tokens, for all its layers."""

    def commit(self, pending: tuple[jax.Array, ...], block: Block, accepted: Accepted) -> Self:
        """Writes the accepted nodes of `pending` (leaves [L, B, N, ...]); everything else is left as it is."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of equal attention layers, in pages that rows own through a page table.

    `backend` says what reads and writes the pages, and with that their layout: D is the head size, rounded up where the
    backend takes whole lanes only (the rest stays 0).
    """

    keys: jax.Array  # [L, pages, K, page_size, D]
    values: jax.Array  # [L, pages, K, page_size, D]
    backend: str = dataclasses.field(default="xla", metadata={"static": True})

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: jnp.dtype,
        backend: str = "xla",
    ) -> "PagedKV":
        shape = (num_layers, num_pages, num_kv_heads, page_size, padded_head_dim(backend, head_dim))
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), backend)

    def attend(
        self,
        block: TokenBlock,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        layer: int | jax.Array,
        scale: float,
    ) -> jax.Array:
        """`Block.attend` over these pages, by the backend's kernel."""
        assert isinstance(block, Block), "only a block has its prefix in pages"
        pool, kernel = (self.keys, self.values), attention_kernel(self.backend)
        return block.attend(queries, keys, values, pool, layer, scale, kernel=kernel)

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


def scatter_rows(
    pool: tuple[jax.Array, jax.Array], pending: tuple[jax.Array, ...], block: Block, accepted: Accepted
) -> tuple[jax.Array, jax.Array]:
    """What XLA compiles on any platform, and what every kernel is compared with.

    Args:
        pool: keys and values, each [L, pages, K, page_size, D].
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

    keys, values = pending
    return write(pool[0], keys), write(pool[1], values)
