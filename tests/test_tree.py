"""Trees as flat arrays: masks, depths and packed bits against a walk in plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tree import ancestor_mask, chain_parents, node_depths, pack_bits, unpack_bits


def random_parents(rng: np.random.Generator, num_rows: int, num_nodes: int) -> np.ndarray:
    """Any parent before the node itself: from bushes to chains."""
    above = [rng.integers(0, max(node, 1), size=num_rows) for node in range(num_nodes)]
    parents = np.stack(above, axis=1).astype(np.int32)
    parents[:, 0] = -1
    return parents


def ancestors_of(parents: np.ndarray, node: int) -> list[int]:
    """The node, its parent, ..., the root."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path


def test_ancestor_mask_marks_self_and_ancestors():
    parents = jnp.array([[-1, 0, 0, 1]])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    np.testing.assert_array_equal(ancestor_mask(parents, depth=2)[0], expected)
    np.testing.assert_array_equal(node_depths(parents, depth=2)[0], [0, 1, 1, 2])


def test_the_mask_of_a_chain_is_causal_order():
    parents = chain_parents(3, 5)
    np.testing.assert_array_equal(parents[2], [-1, 0, 1, 2, 3])
    np.testing.assert_array_equal(ancestor_mask(parents, depth=4), np.tril(np.ones((3, 5, 5), bool)))
    np.testing.assert_array_equal(node_depths(parents, depth=4)[1], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("num_nodes", [1, 2, 9, 40, 70])
def test_mask_and_depth_equal_the_walk_to_the_root(num_nodes):
    parents = random_parents(np.random.default_rng(num_nodes), 3, num_nodes)
    expected = np.zeros((3, num_nodes, num_nodes), bool)
    depths = np.zeros((3, num_nodes), int)
    for row in range(3):
        for node in range(num_nodes):
            path = ancestors_of(parents[row], node)
            expected[row, node, path] = True
            depths[row, node] = len(path) - 1
    depth = int(depths.max())
    np.testing.assert_array_equal(ancestor_mask(jnp.asarray(parents), depth), expected)
    np.testing.assert_array_equal(node_depths(jnp.asarray(parents), depth), depths)
    # A bound above the real depth changes nothing.
    np.testing.assert_array_equal(ancestor_mask(jnp.asarray(parents), depth + 3), expected)
    np.testing.assert_array_equal(node_depths(jnp.asarray(parents), depth + 3), depths)


def test_bit_j_of_word_w_is_node_32_w_plus_j():
    mask = np.zeros((2, 70), bool)
    mask[0, [0, 5, 31]] = True
    mask[1, [32, 69]] = True
    packed = pack_bits(jnp.asarray(mask))
    assert packed.dtype == jnp.uint32
    np.testing.assert_array_equal(packed, np.array([[1 | 1 << 5 | 1 << 31, 0, 0], [0, 1, 1 << 5]], np.uint32))


@pytest.mark.parametrize(("size", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_unpack_undoes_pack(size, words):
    mask = np.random.default_rng(size).random((2, 3, size)) < 0.5
    packed = pack_bits(jnp.asarray(mask))
    assert packed.shape == (2, 3, words)
    np.testing.assert_array_equal(unpack_bits(packed, size), mask)
