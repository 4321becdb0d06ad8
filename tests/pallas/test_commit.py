"""Writing into pages by a kernel against XLA's scatter, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import Block
from jaxspec.kv_cache import Accepted, scatter_rows
from jaxspec.pallas import commit_tpu

NUM_LAYERS, NUM_KV, DIM, NUM_NODES = 4, 2, 128, 5


def check(table, prefix_len, path, count, *, page_size: int, dtype: str = "float32", head_dim: int = DIM) -> None:
    """Both leave the same bits in every place; what is not committed is NaN."""
    rng = np.random.default_rng(0)
    table, prefix_len, path, count = (jnp.asarray(x, jnp.int32) for x in (table, prefix_len, path, count))
    block = Block(jnp.zeros((len(prefix_len), NUM_NODES), jnp.int32), prefix_len, table)
    held = rng.random((2, NUM_LAYERS, 9, NUM_KV, page_size, DIM))
    pool = jnp.asarray(held[0], dtype), jnp.asarray(held[1], dtype)
    nodes = rng.random((2, NUM_LAYERS, len(prefix_len), NUM_NODES, NUM_KV, head_dim)) + 2
    pending = np.full_like(nodes, np.nan)
    for row, taken in enumerate(np.asarray(count)):
        kept = np.asarray(path)[row, :taken]
        pending[:, :, row, kept] = nodes[:, :, row, kept]
    padded = np.pad(pending, [(0, 0)] * 5 + [(0, DIM - head_dim)])
    accepted = Accepted(path, count)
    expected = scatter_rows(pool, (jnp.asarray(padded[0], dtype), jnp.asarray(padded[1], dtype)), block, accepted)
    with pltpu.force_tpu_interpret_mode():
        given = jnp.asarray(pending[0], dtype), jnp.asarray(pending[1], dtype)
        written = jax.jit(commit_tpu.commit_rows)(pool, given, block, accepted)
    for ours, theirs in zip(written, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


TABLE = [[3, 7, 1, 4], [0, 5, 2, -1], [8, 6, -1, -1]]
PATH = [[0, 2, 4, 4], [0, 1, 3, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize(("dtype", "page_size"), [("float32", 8), ("bfloat16", 16), ("bfloat16", 64)])
def test_the_accepted_path_is_written_and_nothing_else(dtype, page_size):
    # At the start of a page, across two tiles, across two pages, up to a page's end; a row with nothing to write.
    for prefix_len, count in (([0, 7, 15], [4, 3, 1]), ([page_size - 2, 2 * page_size - 1, 12], [4, 0, 4])):
        check(TABLE, prefix_len, PATH, count, page_size=page_size, dtype=dtype)


def test_positions_without_a_page_are_dropped():
    check([[3, -1], [-1, -1]], [6, 0], [[0, 1, 2, 3]] * 2, [4, 4], page_size=8)
    check([[3, 5]], [14], [[0, 1, 2, 3]], [4], page_size=8)


def test_narrow_heads_fill_their_lanes_with_zeros():
    check(TABLE, [0, 6, 3], PATH, [4, 3, 0], page_size=8, head_dim=64)


def test_layers_are_written_in_as_many_parts_as_it_takes(monkeypatch):
    monkeypatch.setattr(commit_tpu, "TILE_BYTES", 2 * NUM_KV * 8 * DIM * 4)
    check(TABLE, [0, 6, 3], PATH, [4, 3, 1], page_size=8)
