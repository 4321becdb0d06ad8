"""Attention in two parts against dense softmax in float64; whatever is not a committed token is poisoned with NaN."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import PLAIN_SCORING, PREFIX_BLOCK, AttentionInputs, Block, Scoring, prefix_attention
from jaxspec.tree import ancestor_mask, pack_bits

NUM_LAYERS, LAYER, SCALE = 2, 1, 0.3

jit_attend = jax.jit(Block.attend, static_argnames=("scale", "scoring"))


class Case(NamedTuple):
    """Inputs of `Block.attend`, and the dense view of the same."""

    queries: np.ndarray  # [B, N, H, D]
    keys: np.ndarray  # [B, M, K, D]
    values: np.ndarray
    prefix: tuple[np.ndarray, np.ndarray]  # keys and values [B, S, K, D]; beyond a row's length they mean nothing
    lengths: np.ndarray  # [B]
    visible: np.ndarray  # bool [B, N, M]
    page_size: int

    def paged(self, rng: np.random.Generator) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Pools that hold the prefixes in shuffled pages, NaN elsewhere; the table is -1 behind a page to spare."""
        num_rows, longest, num_kv, dim = self.prefix[0].shape
        width = -(-max(longest, 1) // self.page_size) + 2
        order = rng.permutation(num_rows * width).reshape(num_rows, width)
        shape = (NUM_LAYERS, num_rows * width + 1, num_kv, self.page_size, dim)
        pools = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        table = np.full((num_rows, width), -1, np.int32)
        for row, length in enumerate(self.lengths):
            used = -(-int(length) // self.page_size) + 1
            table[row, :used] = order[row, :used]
            for position in range(length):
                page, slot = table[row, position // self.page_size], position % self.page_size
                for pool, rows in zip(pools, self.prefix, strict=True):
                    pool[LAYER, page, :, slot] = rows[row, position]
        return pools, table

    def run(self, *, causal: bool = False, dtype: str = "float32", scoring=PLAIN_SCORING, sinks=None) -> np.ndarray:
        """`Block.attend` over pages."""
        pools, table = self.paged(np.random.default_rng(1))
        bits = None if causal else pack_bits(jnp.asarray(self.visible))
        positions = self.lengths[:, None] + self.depths
        block = Block(jnp.asarray(positions, jnp.int32), jnp.asarray(self.lengths), jnp.asarray(table), bits)
        arrays = [jnp.asarray(x, dtype) for x in (self.queries, self.keys, self.values)]
        pool = jnp.asarray(pools[0], dtype), jnp.asarray(pools[1], dtype)
        how = {"scale": SCALE, "scoring": scoring, "sinks": None if sinks is None else jnp.asarray(sinks)}
        return np.asarray(jit_attend(block, *arrays, pool, jnp.int32(LAYER), **how))

    @property
    def depths(self) -> np.ndarray:
        """[B, N]: how many keys of the block come before each node."""
        return self.visible.sum(axis=2) - 1

    def dense(self, scoring: Scoring = PLAIN_SCORING, sinks: np.ndarray | None = None) -> np.ndarray:
        """Softmax over everything visible, in float64."""
        num_rows, num_nodes, num_heads, _ = self.queries.shape
        group = num_heads // self.keys.shape[2]
        out = np.zeros((num_rows, num_nodes, num_heads, self.values.shape[-1]))
        for row, node, head in np.ndindex(num_rows, num_nodes, num_heads):
            kv, length, seen = head // group, self.lengths[row], self.visible[row, node]
            # What a node sees is one path: the prefix, then its ancestors in order.
            keys = np.concatenate([self.prefix[0][row, :length, kv], self.keys[row, seen, kv]]).astype(np.float64)
            values = np.concatenate([self.prefix[1][row, :length, kv], self.values[row, seen, kv]])
            keys, values = (path[-(scoring.window or len(path)) :] for path in (keys, values))
            scores = keys @ self.queries[row, node, head].astype(np.float64) * SCALE
            if scoring.soft_cap is not None:
                scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
            out[row, node, head] = weights @ values / (weights.sum() + sink)
        return out


def make_case(
    lengths: list[int],
    *,
    page_size: int = 16,
    num_nodes: int = 3,
    heads: tuple[int, int] = (4, 2),
    visible: np.ndarray | None = None,
    spread: float = 1.0,
) -> Case:
    """Random tokens; the block is causal unless `visible` says otherwise. `spread` widens the scores."""
    rng = np.random.default_rng(0)
    num_rows, (num_heads, num_kv), dim = len(lengths), heads, 8
    if visible is None:
        visible = np.broadcast_to(np.tril(np.ones((num_nodes, num_nodes), bool)), (num_rows, num_nodes, num_nodes))
    num_nodes, num_keys = visible.shape[1:]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((num_rows, *shape)).astype(np.float32)

    prefix = normal(max(lengths), num_kv, dim), normal(max(lengths), num_kv, dim)
    queries, keys, values = (
        normal(num_nodes, num_heads, dim),
        normal(num_keys, num_kv, dim),
        normal(num_keys, num_kv, dim),
    )
    return Case(queries * spread, keys, values, prefix, np.array(lengths, np.int32), visible, page_size)


def tree_visible(parents: list[list[int]], num_earlier: int = 0) -> np.ndarray:
    """bool [B, N, earlier + N]: ancestors, behind random earlier nodes."""
    own = np.asarray(ancestor_mask(jnp.asarray(parents), depth=len(parents[0]) - 1))
    earlier = np.random.default_rng(2).random((*own.shape[:2], num_earlier)) < 0.5
    return np.concatenate([earlier, own], axis=2)


def check(case: Case, *, causal: bool = False, **how) -> None:
    np.testing.assert_allclose(case.run(causal=causal, **how), case.dense(**how), rtol=1e-5, atol=2e-6)


# No token, one, the last of a page, a full page, the first of the next, and more than one step of the walk.
@pytest.mark.parametrize(
    ("page_size", "lengths"),
    [
        (1, [0, 1, 2, 255, 256, 300]),
        (16, [0, 1, 15, 16, 17, 256, 257, 600]),
        (64, [0, 1, 63, 64, 65, 256, 320]),
        (1024, [0, 1, 1023, 1024, 1025, 2048]),
    ],
)
def test_ragged_prefixes_of_any_page_size_equal_dense_softmax(page_size, lengths):
    assert max(lengths) > PREFIX_BLOCK
    check(make_case(lengths, page_size=page_size), causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_query_heads_of_one_group_share_their_kv_head(heads):
    check(make_case([0, 5, 40], heads=heads), causal=True)


def test_ancestor_bits_of_a_chain_are_causal_order():
    case = make_case([0, 16, 40])
    np.testing.assert_array_equal(case.run(causal=False), case.run(causal=True))


def test_a_node_sees_the_prefix_and_its_ancestors_only():
    parents = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]]
    check(make_case([0, 16, 33], visible=tree_visible(parents)))


@pytest.mark.parametrize("num_earlier", [1, 30, 40])
def test_earlier_nodes_come_before_the_blocks_own(num_earlier):
    """At 30 the bits of one node reach into a second word, at 40 the block's own nodes lie in it."""
    parents = [[-1, 0, 0, 1], [-1, 0, 1, 2]]
    check(make_case([0, 20], visible=tree_visible(parents, num_earlier)))


def test_a_causal_block_sees_all_earlier_nodes():
    visible = np.broadcast_to(np.tril(np.ones((3, 8), bool), 5), (2, 3, 8))
    check(make_case([7, 0], visible=visible), causal=True)


def test_a_token_counts_the_same_in_the_prefix_and_in_the_block():
    whole = make_case([20], num_nodes=6)
    keys, values = (np.concatenate([old, new], 1) for old, new in zip(whole.prefix, (whole.keys, whole.values)))
    later = Case(whole.queries[:, 4:], keys[:, 24:], values[:, 24:], (keys[:, :24], values[:, :24]), whole.lengths + 4,
                 np.tril(np.ones((1, 2, 2), bool)), 16)  # fmt: skip
    np.testing.assert_allclose(later.run(causal=True), whole.run(causal=True)[:, 4:], rtol=1e-5, atol=1e-6)


def test_the_first_token_of_a_long_prefix_is_not_forgotten():
    case = make_case([700])
    case.prefix[0][0, 0] = 0
    case.prefix[0][0, 0, :, 0] = 200
    case.queries[..., 0] = 2
    expected = np.repeat(case.prefix[1][0, 0], 2, axis=0)
    np.testing.assert_allclose(case.run(causal=True)[0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("spread", [1e-6, 300.0])
def test_flat_and_sharp_scores_stay_exact(spread):
    check(make_case([0, 3, 300], spread=spread), causal=True)


# Smaller than the deepest path, just the path and a little of the prefix, and larger than some prefixes.
@pytest.mark.parametrize("window", [1, 2, 4, 70])
def test_a_window_ends_at_the_node_and_counts_along_its_path(window):
    parents = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0], [-1, 0, 1, 1, 2, 4]]
    check(make_case([0, 16, 33, 300], visible=tree_visible(parents)), scoring=Scoring(window=window))
    check(make_case([0, 63, 64, 300], num_nodes=6), causal=True, scoring=Scoring(window=window))


def test_pages_before_every_window_are_not_read():
    case = make_case([200, 230])
    expected = case.run(causal=True, scoring=Scoring(window=20))
    for pool in case.prefix:
        pool[:, :128] = np.nan
    np.testing.assert_array_equal(case.run(causal=True, scoring=Scoring(window=20)), expected)


def test_soft_caps_and_sinks_change_the_softmax():
    case = make_case([0, 16, 100], visible=tree_visible([[-1, 0, 0, 1]] * 3), spread=20.0)
    check(case, scoring=Scoring(soft_cap=3.0), sinks=np.array([-2.0, 0.0, 1.0, 40.0], np.float32))


def test_a_row_does_not_depend_on_other_rows_lengths_in_any_bit():
    long = make_case([5, 600, 0, 270])
    alone = [long._replace(lengths=np.where(np.arange(4) == row, long.lengths, 0)) for row in range(4)]
    together = long.run(causal=True)
    for row, case in enumerate(alone):
        np.testing.assert_array_equal(case.run(causal=True)[row], together[row])


def test_a_row_without_a_prefix_adds_no_mass():
    """Also where the walk goes on for its neighbours: to be merged with a part of any size."""
    case = make_case([0, 300])
    pools, table = case.paged(np.random.default_rng(1))
    queries = jnp.asarray(case.queries.reshape(2, 3, 2, 2, 8).transpose(0, 2, 1, 3, 4).reshape(2, 2, 6, 8))
    block = Block(jnp.zeros((2, 3), jnp.int32), jnp.asarray(case.lengths), jnp.asarray(table))
    pool, own = (jnp.asarray(pools[0]), jnp.asarray(pools[1])), (jnp.asarray(case.keys), jnp.asarray(case.values))
    part = prefix_attention(AttentionInputs(queries, *own, pool, LAYER, block))
    assert not part.mass[0].any()
    assert not part.values[0].any()
    assert part.mass[1].all()


def test_infinite_garbage_beyond_the_length_is_not_read():
    case = make_case([0, 16, 21])
    expected = case.run(causal=True)
    rng = np.random.default_rng(1)
    pools, table = case.paged(rng)
    garbage = tuple(jnp.asarray(np.where(np.isnan(pool), np.inf, pool)) for pool in pools)
    positions = jnp.asarray(case.lengths[:, None] + np.arange(3), jnp.int32)
    block = Block(positions, jnp.asarray(case.lengths), jnp.asarray(table))
    out = jit_attend(block, case.queries, case.keys, case.values, garbage, jnp.int32(LAYER), scale=SCALE)
    np.testing.assert_array_equal(out, expected)


def test_bfloat16_is_summed_in_float32():
    case = make_case([0, 100, 600])
    out = case.run(causal=True, dtype="bfloat16")
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), case.dense(), atol=0.03)
