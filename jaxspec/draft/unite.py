"""Several trees, or several guesses, as one: branches that share a prefix share nodes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.draft.grow import Candidates, choose
from jaxspec.tree import DraftTree


def unite(bonus: jax.Array, found: Candidates, *, depth: int, num_nodes: int) -> DraftTree:
    """The best `num_nodes - 1` candidates, after those that continue the same prefix by the same token became one.

    A united node has the best score among its parts, so that none is above its parent's.

    Args:
        bonus: int32 [B].
        found: with -1 for tokens that are no draft.
        depth: longest path among them.
        num_nodes: root included.
    """
    count = found.tokens.shape[1]
    order = jnp.arange(count, dtype=jnp.int32)
    first = jnp.broadcast_to(order, found.tokens.shape)  # the first candidate that each one is equal to
    # After d passes this holds for nodes of depth d: their parents' first ones are known then.
    for _ in range(depth):
        above = jnp.where(found.parents < 0, -1, jnp.take_along_axis(first, jnp.maximum(found.parents, 0), axis=1))
        same = (found.tokens[:, :, None] == found.tokens[:, None, :]) & (above[:, :, None] == above[:, None, :])
        first = jnp.argmax(same, axis=-1).astype(jnp.int32)
    above = jnp.where(found.parents < 0, -1, jnp.take_along_axis(first, jnp.maximum(found.parents, 0), axis=1))
    parts = first[:, None, :] == order[:, None]
    scores = jnp.max(jnp.where(parts, found.scores[:, None, :], -jnp.inf), axis=-1)
    scores = jnp.where((first == order) & (found.tokens >= 0), scores, -jnp.inf)
    missing = max(0, num_nodes - 1 - count)
    pad = lambda leaf, value: jnp.pad(leaf, ((0, 0), (0, missing)), constant_values=value)  # noqa: E731
    candidates = Candidates(pad(found.tokens, -1), pad(scores, -jnp.inf), pad(above, -1))
    return choose(bonus, candidates, num_nodes=num_nodes)


def unite_trees(trees: Sequence[DraftTree], *, depth: int, num_nodes: int) -> DraftTree:
    """One tree of `num_nodes` nodes from scored trees with the same root; among equals the earlier tree's come first.

    Raises:
        ValueError: a tree has no scores.
    """
    parts, offset = [], 0
    for tree in trees:
        if tree.scores is None:
            raise ValueError("a tree without scores cannot be united with others; let its method score its drafts.")
        parents = jnp.where(tree.parents > 0, tree.parents - 1 + offset, -1)
        parts.append(Candidates(tree.tokens[:, 1:], tree.scores[:, 1:], parents[:, 1:].astype(jnp.int32)))
        offset += tree.tokens.shape[1] - 1
    found = Candidates(*(jnp.concatenate(leaves, axis=1) for leaves in zip(*parts)))
    return unite(trees[0].tokens[:, 0], found, depth=depth, num_nodes=num_nodes)
