"""Writing accepted keys and values into pages in place on TPUs (Mosaic).

A page in memory is made of tiles of several tokens, and a tile is the least that can be copied. So a row's new tokens
are laid out by tiles, and each tile that gets some is read, filled in and written back, all layers at once. XLA's own
scatter wants the pools in another layout than the attention kernel, and would copy them whole in every round.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import Block

if TYPE_CHECKING:
    from jaxspec.kv_cache import Accepted

# Sublanes of a 32-bit register; narrower numbers are packed below one another.
SUBLANES = 8
# Bytes of one pool's tiles of as many layers as are copied together.
TILE_BYTES = 4 << 20
VMEM_BYTES = 48 << 20


class Rows(NamedTuple):
    """Scalars of every row: where its new tokens go, and how many they are."""

    table: Any  # int32 [B, pages]
    start: Any  # int32 [B], position of the first one
    count: Any  # int32 [B]


def tile_len(dtype: jnp.dtype) -> int:
    """Tokens of one tile."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def commit_rows(
    pool: tuple[jax.Array, jax.Array], pending: tuple[jax.Array, ...], block: Block, accepted: "Accepted"
) -> tuple[jax.Array, jax.Array]:
    """See `jaxspec.kv_cache.scatter_rows`, its twin; the pools are written in place."""
    size = tile_len(pool[0].dtype)
    page_size = pool[0].shape[3]
    assert page_size % size == 0, "a page is made of whole tiles"
    path_len = accepted.path.shape[1]
    num_tiles = (path_len + size - 2) // size + 1  # however the first token lies in its tile
    # Where each place of the tiles lies behind the first new token, and which node that is.
    offset = jnp.arange(num_tiles * size, dtype=jnp.int32) - (block.prefix_len % size)[:, None]
    node = jnp.take_along_axis(accepted.path, jnp.clip(offset, 0, path_len - 1), axis=1)

    def lay_out(rows: jax.Array) -> jax.Array:
        """Rows [L, B, N, K, D] by tiles: [L, B, W, K, tile, D]."""
        num_layers, num_rows, _, num_kv, head_dim = rows.shape
        chosen = jnp.take_along_axis(rows, node[None, :, :, None, None], axis=2)
        chosen = chosen.reshape(num_layers, num_rows, num_tiles, size, num_kv, head_dim).transpose(0, 1, 2, 4, 3, 5)
        return jnp.pad(chosen, [(0, 0)] * 5 + [(0, pool[0].shape[4] - head_dim)])

    keys, values = pending
    return _call(Rows(block.table, block.prefix_len, accepted.count), lay_out(keys), lay_out(values), *pool)


def _call(scalars: Rows, keys: jax.Array, values: jax.Array, *pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    num_layers, num_rows, num_tiles, num_kv, size, head_dim = keys.shape
    one_layer = num_kv * size * head_dim * keys.dtype.itemsize
    fitting = max(1, TILE_BYTES // one_layer)
    # The largest divisor, so that every copy has one size.
    layers = next(count for count in range(min(fitting, num_layers), 0, -1) if num_layers % count == 0)
    rows = pl.BlockSpec((layers, 1, 1, num_kv, size, head_dim), lambda row, tile, part, *_: (part, row, tile, 0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    held = pltpu.VMEM((layers, num_kv, size, head_dim), keys.dtype)
    return pl.pallas_call(
        functools.partial(_fill_tile, layers),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_rows, num_tiles, num_layers // layers),
            in_specs=[rows, rows, anywhere, anywhere],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[held, held, pltpu.SemaphoreType.DMA((2,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pool],
        input_output_aliases={len(scalars) + 2: 0, len(scalars) + 3: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_BYTES),
        name="commit_tpu",
    )(*scalars, keys, values, *pool)


def _fill_tile(layers: int, *refs: Any) -> None:
    """One tile of one row, for `layers` layers; the pools are read and written through the outputs."""
    (table, start, count), (keys, values, _, _, *pools), (*held, semaphores) = refs[:3], refs[3:9], refs[9:]
    row, tile, part = (pl.program_id(axis) for axis in range(3))
    size, page_size, width = held[0].shape[2], pools[0].shape[3], table.shape[1]
    first = (jax.lax.div(start[row], size) + tile) * size  # position of the tile's first token
    page = table[row, jnp.minimum(jax.lax.div(first, page_size), width - 1)]
    low, high = start[row] - first, start[row] + count[row] - first  # of the tile's tokens, those that are new

    @pl.when((high > jnp.maximum(low, 0)) & (page >= 0) & (first < width * page_size))
    def _():
        slots = pl.ds(pl.multiple_of(jax.lax.rem(first, page_size), size), size)
        places = [pool.at[pl.ds(part * layers, layers), page, :, slots] for pool in pools]
        reads = [pltpu.make_async_copy(*pair, semaphores.at[kind]) for kind, pair in enumerate(zip(places, held))]
        writes = [pltpu.make_async_copy(*pair, semaphores.at[kind]) for kind, pair in enumerate(zip(held, places))]
        for copy in reads:
            copy.start()
        for copy, write, new, old in zip(reads, writes, (keys, values), held):
            copy.wait()
            tokens = jax.lax.broadcasted_iota(jnp.int32, old.shape, 2)
            old[...] = jnp.where((tokens >= low) & (tokens < high), new[:, 0, 0], old[...])
            write.start()
        for write in writes:
            write.wait()
