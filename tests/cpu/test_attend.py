"""The CPU's attention: softmax over what a query sees, and bitwise the same wherever the keys lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import AttentionKernel, Block, two_part_attention
from jaxspec.cpu.attend import attend_to_block
from jaxspec.cpu.register import why_not
from jaxspec.tree import pack_bits

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or why_not() is not None, reason=f"needs the CPU's kernels: {why_not()}"
)

SCALE, LAYER = 0.3, 1


class Pages:
    """Rows of keys and values, in shuffled pages with NaN behind them."""

    def __init__(self, lengths: list[int], *, page_size: int, num_kv: int, dim: int):
        rng = np.random.default_rng(0)
        width = max(lengths) // page_size + 1
        self.lengths = np.array(lengths, np.int32)
        self.rows = [rng.normal(size=(len(lengths), max(lengths), num_kv, dim)).astype(np.float32) for _ in "kv"]
        order = rng.permutation(len(lengths) * width).reshape(len(lengths), width)
        self.table = np.where(np.arange(width) * page_size < self.lengths[:, None], order, -1).astype(np.int32)
        self.pool = np.full((2, 2, order.size, num_kv, page_size, dim), np.nan, np.float32)
        for row, length in enumerate(lengths):
            for at in range(length):
                for which in range(2):
                    self.pool[which, LAYER, order[row, at // page_size], :, at % page_size] = self.rows[which][row, at]

    def attend(
        self, queries, keys, values, visible, lengths=None, kernel: AttentionKernel = attend_to_block
    ) -> np.ndarray:
        lengths = self.lengths if lengths is None else np.array(lengths, np.int32)
        bits = None if visible is None else pack_bits(jnp.asarray(visible))
        nodes = queries.shape[1]
        block = Block(
            jnp.asarray(lengths[:, None] + np.arange(nodes)), jnp.asarray(lengths), jnp.asarray(self.table), bits
        )

        def run(block, queries, keys, values, pool):
            return block.attend(queries, keys, values, tuple(pool), LAYER, SCALE, kernel=kernel)

        return np.asarray(jax.jit(run)(block, queries, keys, values, jnp.asarray(self.pool)))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 8), ((9, 3), 64), ((5, 1), 36), ((2, 2), 6)])
def test_it_agrees_with_xla(page_size, heads, dim):
    lengths, nodes, earlier = [0, 1, 17, 130], 6, 3
    (num_heads, num_kv), rows = heads, len(lengths)
    pages = Pages(lengths, page_size=page_size, num_kv=num_kv, dim=dim)
    queries, keys, values = (
        random(rows, nodes, num_heads, dim),
        *(random(rows, earlier + nodes, num_kv, dim + which)[..., :dim] for which in range(2)),
    )
    seen = np.random.default_rng(3).random((rows, nodes, earlier + nodes)) < 0.5
    seen[:, np.arange(nodes), earlier + np.arange(nodes)] = True
    for visible in (seen, None):
        found = pages.attend(queries, keys, values, visible)
        np.testing.assert_allclose(
            found, pages.attend(queries, keys, values, visible, kernel=two_part_attention), rtol=2e-5, atol=2e-6
        )


def test_a_token_in_the_block_counts_as_one_in_a_page():
    """What makes speculation exact: the last tokens of a prefix, moved into the block, change no bit."""
    dim, num_kv, num_heads = 16, 2, 6
    pages = Pages([75, 40], page_size=16, num_kv=num_kv, dim=dim)
    queries, keys, values = (
        random(2, 1, num_heads, dim),
        random(2, 1, num_kv, dim),
        random(2, 1, num_kv, dim + 1)[..., :dim],
    )
    alone = pages.attend(queries, keys, values, None)
    for moved in (1, 4, 33):
        lengths = pages.lengths - moved
        # The moved tokens, then nodes that the last one does not see, then the last one.
        behind = [np.stack([rows[b, n : n + moved] for b, n in enumerate(lengths)]) for rows in pages.rows]
        other = random(2, 3, num_kv, dim)
        block_keys = np.concatenate([behind[0], other, keys], axis=1)
        block_values = np.concatenate([behind[1], other, values], axis=1)
        nodes = moved + 4
        many = np.concatenate([random(2, nodes - 1, num_heads, dim), queries], axis=1)
        visible = np.broadcast_to(np.tril(np.ones((nodes, nodes), bool)), (2, nodes, nodes)).copy()
        visible[:, -1, moved:-1] = False
        found = pages.attend(many, block_keys, block_values, visible, lengths)
        np.testing.assert_array_equal(found[:, -1:], alone)


def test_a_row_does_not_depend_on_its_neighbours():
    dim, num_kv, num_heads, nodes = 32, 2, 8, 5
    pages = Pages([10, 90, 33], page_size=16, num_kv=num_kv, dim=dim)
    queries, keys, values = (
        random(3, nodes, num_heads, dim),
        random(3, nodes, num_kv, dim),
        random(3, nodes, num_kv, dim),
    )
    together = pages.attend(queries, keys, values, None)
    for row in range(3):
        one = slice(row, row + 1)
        alone = Pages([10, 90, 33], page_size=16, num_kv=num_kv, dim=dim)
        alone.table, alone.lengths = alone.table[one], alone.lengths[one]
        np.testing.assert_array_equal(alone.attend(queries[one], keys[one], values[one], None), together[one])


def test_far_apart_scores_do_not_overflow():
    pages = Pages([20], page_size=16, num_kv=1, dim=8)
    queries, keys, values = 300 * random(1, 2, 2, 8), random(1, 2, 1, 8), random(1, 2, 1, 8)
    found = pages.attend(queries, keys, values, None)
    np.testing.assert_allclose(
        found, pages.attend(queries, keys, values, None, kernel=two_part_attention), rtol=2e-5, atol=2e-6
    )


def test_a_long_causal_block_agrees_with_xla():
    """Several words of bits, full and empty ones among them."""
    pages = Pages([40, 3], page_size=16, num_kv=1, dim=16)
    queries, keys, values = random(2, 100, 3, 16), random(2, 100, 1, 16), random(2, 100, 1, 17)[..., :16]
    found = pages.attend(queries, keys, values, None)
    np.testing.assert_allclose(
        found, pages.attend(queries, keys, values, None, kernel=two_part_attention), rtol=2e-5, atol=2e-6
    )
