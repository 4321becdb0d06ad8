"""Draft trees as flat arrays, and the packed ancestor bits that are the tree mask's one representation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

WORD_BITS = 32


class DraftTree(NamedTuple):
    """A batch of draft trees; node 0 is the bonus token, the last emitted one, which is not in the cache yet.

    A chain is the tree whose parents are -1, 0, 1, ...
    """

    tokens: jax.Array  # int32 [B, N]; -1 marks a node that holds no draft (it matches nothing and is not counted)
    parents: jax.Array  # int32 [B, N]; parents[:, 0] == -1, else parents[:, i] < i
    # float32 [B, N]: log of the draft's own estimate that a node is accepted, 0 at the root; None where it makes none.
    scores: jax.Array | None = None
    # float32 [B, N - 1, V]: of a chain, the law that each draft was drawn from; None where they are no draws.
    laws: jax.Array | None = None


def chain_parents(num_rows: int, num_nodes: int) -> jax.Array:
    """Parents of a chain: int32 [B, N] with rows -1, 0, 1, ..."""
    return jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32) - 1, (num_rows, num_nodes))


def ancestor_mask(parents: jax.Array, depth: int) -> jax.Array:
    """Marks, for each node, itself and its ancestors: what it may attend to.

    For parents [-1, 0, 0, 1] (a root with two children, one grandchild):

        [[1, 0, 0, 0],
         [1, 1, 0, 0],
         [1, 0, 1, 0],
         [1, 1, 0, 1]]

    Args:
        parents: int32 [B, N], index of each node's parent, -1 for the root.
        depth: longest path in edges; bounds the walk so that the shape is static.

    Returns:
        bool [B, N, N].
    """
    num_nodes = parents.shape[1]
    nodes = jnp.arange(num_nodes)
    mask = jnp.broadcast_to(nodes[:, None] == nodes, (*parents.shape, num_nodes))
    ancestor = parents
    for _ in range(depth):
        mask |= ancestor[..., None] == nodes
        # -1 has no parent: clip to read something, then put the -1 back.
        above = jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1)
        ancestor = jnp.where(ancestor < 0, -1, above)
    return mask


def node_depths(parents: jax.Array, depth: int) -> jax.Array:
    """Edges between each node and the root: int32 [B, N] from parents [B, N]; `depth` bounds the walk."""
    depths = jnp.zeros_like(parents)
    ancestor = parents
    for _ in range(depth):
        depths += ancestor >= 0
        above = jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1)
        ancestor = jnp.where(ancestor < 0, -1, above)
    return depths


def pack_bits(mask: jax.Array) -> jax.Array:
    """Packs bool [..., M] into uint32 [..., ceil(M / 32)]; bit j of word w is mask[..., 32 w + j]."""
    size = mask.shape[-1]
    words = -(-size // WORD_BITS)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * WORD_BITS - size)])
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(WORD_BITS, dtype=jnp.uint32))
    lanes = padded.reshape(*mask.shape[:-1], words, WORD_BITS)
    return jnp.sum(jnp.where(lanes, weights, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)


def unpack_bits(bits: jax.Array, size: int) -> jax.Array:
    """Undoes `pack_bits`: uint32 [..., W] -> bool [..., size]."""
    lanes = jnp.right_shift(bits[..., None], jnp.arange(WORD_BITS, dtype=jnp.uint32)) & jnp.uint32(1)
    return lanes.reshape(*bits.shape[:-1], bits.shape[-1] * WORD_BITS)[..., :size].astype(bool)
