"""Growing a tree: the same nodes as EAGLE-2 written out in Python, over a draft whose law is a table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.grow import Children, Frontier, Level, TreeShape, best_children, grow
from jaxspec.tree import DraftTree, unpack_bits

VOCAB = 12
BONUS = [3, 0, 7]
SHAPES = [TreeShape(3, 2, 6), TreeShape(5, 4, 8), TreeShape(4, 8, 32), TreeShape(3, 1, 4), TreeShape(1, 4, 5)]


def random_law(seed: int) -> np.ndarray:
    """Scores of the next token, [2, V, V], by the parity of the path's sum and by the last token."""
    logits = np.random.default_rng(seed).normal(0, 2, (2, VOCAB, VOCAB))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def coarse_law(seed: int) -> np.ndarray:
    """Of few values, so that scores are often equal; sums of small whole numbers are exact."""
    return np.random.default_rng(seed).integers(-3, 1, (2, VOCAB, VOCAB)).astype(np.float64)


@dataclasses.dataclass
class Node:
    """A node of the reference tree; the root has no parent and index -1."""

    token: int
    score: float
    path_sum: int
    parent: "Node | None" = None
    index: int = -1  # among all candidates

    def path(self) -> list[int]:
        """Tokens from the first draft to this one."""
        return [] if self.parent is None else [*self.parent.path(), self.token]


def best(nodes: list[Node], count: int) -> list[Node]:
    """Ties are broken by index."""
    return sorted(nodes, key=lambda node: (-node.score, node.index))[:count]


def grow_by_hand(law: np.ndarray, bonus: int, shape: TreeShape) -> tuple[list[Node], list[list[Node]]]:
    """EAGLE-2 for one row: the chosen nodes in order, root first, and the nodes run at each level."""
    root = Node(bonus, 0.0, bonus)
    frontier, candidates, levels = [root], [], []
    for depth in range(shape.num_steps):
        found = []
        for parent in frontier:
            scores = law[parent.path_sum % 2, parent.token]
            for token in np.argsort(-scores, kind="stable")[: shape.topk]:
                # A chain has nothing to choose between, and leaves its scores at 0.
                score = parent.score + scores[token] if shape.topk > 1 else 0.0
                found.append(Node(int(token), score, parent.path_sum + int(token), parent, len(candidates)))
                candidates.append(found[-1])
        frontier = best(found, shape.topk)
        if depth < shape.num_steps - 1:
            levels.append(frontier)
    chosen = sorted(best(candidates, shape.num_nodes - 1), key=lambda node: node.index)
    return [root, *chosen], levels


def grow_by_table(law: np.ndarray, shape: TreeShape, *, normalised: bool = True) -> tuple[DraftTree, list[Any]]:
    """The tree, and per level (tokens, carried sums, and per node the ids of the pending rows it may see).

    A node's pending row is an id, 100 * (depth + 1) + its place. Its carry is the sum of its path, on which its law
    depends: a child that was handed another parent's carry gets other children.
    """
    table, bonus = jnp.asarray(law, jnp.float32), jnp.asarray(BONUS, jnp.int32)
    num_slots = (shape.num_steps - 1) * shape.topk
    levels = []

    def children(path_sum: jax.Array, tokens: jax.Array) -> Children:
        scores = table[path_sum % 2, tokens]
        if normalised or shape.topk == 1:
            return best_children(scores, shape.topk)
        kept, chosen = jax.lax.top_k(scores, shape.topk)
        return Children(chosen.astype(jnp.int32), kept)

    def run(frontier: Frontier) -> Level:
        ids = 100 * (frontier.depth + 1) + jnp.arange(shape.topk, dtype=jnp.int32)
        ids = jnp.broadcast_to(ids, frontier.tokens.shape)
        visible = unpack_bits(frontier.ancestors, num_slots + shape.topk)
        rows = np.concatenate([frontier.earlier[0, :, :, 0], ids], axis=1)
        path_sum = frontier.carry + frontier.tokens
        levels.append((np.asarray(frontier.tokens), np.asarray(path_sum), rows, np.asarray(visible)))
        return Level(children(path_sum, frontier.tokens), ids[None, :, :, None], path_sum)

    room = jnp.zeros((1, len(BONUS), num_slots, 1), jnp.int32)
    with jax.disable_jit():  # `run` then sees values, level by level
        tree = grow(bonus, children(bonus, bonus), bonus, room, shape, run)
    return tree, levels


def check_tree(law: np.ndarray, shape: TreeShape, *, normalised: bool = True) -> list[list[int]]:
    """Compares a tree with the reference, and returns its tokens."""
    tree, levels = grow_by_table(law, shape, normalised=normalised)
    assert len(levels) == shape.num_steps - 1
    for row, bonus in enumerate(BONUS):
        nodes, run = grow_by_hand(law, bonus, shape)
        places = {id(node): place for place, node in enumerate(nodes)}
        assert tree.parents[row].tolist() == [-1, *(places[id(node.parent)] for node in nodes[1:])]
        assert all(parent < place for place, parent in enumerate(tree.parents[row].tolist()))
        impossible = [node.score == -np.inf for node in nodes]
        assert tree.tokens[row].tolist() == [-1 if out else node.token for node, out in zip(nodes, impossible)]
        rows_of = {}
        for depth, ((tokens, path_sum, rows, visible), expected) in enumerate(zip(levels, run, strict=True)):
            assert tokens[row].tolist() == [node.token for node in expected]
            assert path_sum[row].tolist() == [node.path_sum for node in expected]
            for place, node in enumerate(expected):
                above = rows_of.get(id(node.parent), set())
                rows_of[id(node)] = {*above, 100 * (depth + 1) + place}
                assert set(rows[row][visible[row, place]].tolist()) == rows_of[id(node)]
                assert visible[row, place].sum() == depth + 1
    return tree.tokens.tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_is_eagle_2s(shape):
    """Nodes, parents, and at each level what is run, what it carries, and which earlier rows it may attend to."""
    for seed in range(3):
        check_tree(random_law(seed), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ties_are_broken_by_index(shape):
    """Many candidates score the same as their parents, and parents must still be chosen and come first."""
    for seed in range(3):
        check_tree(coarse_law(seed), shape, normalised=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_impossible_is_no_draft(shape):
    """Two tokens in each law: a tree of more branches runs out of them."""
    law = random_law(5)
    law[np.argsort(np.argsort(-law, axis=-1), axis=-1) >= 2] = -np.inf
    law -= np.log(np.exp(law).sum(axis=-1, keepdims=True))
    tokens = check_tree(law, shape)
    num_possible = sum(2 * min(2**depth, shape.topk) for depth in range(shape.num_steps))
    assert any(-1 in row for row in tokens) == (shape.num_nodes - 1 > num_possible)


def accept_lengths(
    law: np.ndarray, tokens: list[int], parents: list[int], num_texts: int, num_steps: int
) -> np.ndarray:
    """Of a tree below `tokens[0]`, for texts that are drawn from the law: accepted drafts and the token after them."""
    child = np.full((len(tokens), VOCAB), -1)
    for node in range(1, len(tokens)):
        child[parents[node], tokens[node]] = node
    rng = np.random.default_rng(0)
    last, path_sum = np.full((2, num_texts), tokens[0])
    node, going, lengths = np.zeros(num_texts, int), np.ones(num_texts, bool), np.ones(num_texts, int)
    for _ in range(num_steps):
        upto = np.cumsum(np.exp(law[path_sum % 2, last]), axis=1)
        last = (upto > rng.random((num_texts, 1)) * upto[:, -1:]).argmax(axis=1)
        path_sum = path_sum + last
        going &= child[node, last] >= 0
        node = np.where(going, child[node, last], node)
        lengths += going
    return lengths


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_calibrated_drafts_own_probabilities_predict_the_accept_length(shape):
    """Its law is the target's: the tree's paths are as likely as they seem."""
    law = random_law(6)
    tree, _ = grow_by_table(law, shape)
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist()):
        path_sum, likely = [tokens[0]], [1.0]
        for token, parent in zip(tokens[1:], parents[1:]):
            likely.append(likely[parent] * np.exp(law[path_sum[parent] % 2, tokens[parent], token]))
            path_sum.append(path_sum[parent] + token)
        measured = accept_lengths(law, tokens, parents, 100_000, shape.num_steps).mean()
        # Without the root, which is always accepted: closer than the whole length's 5 %.
        assert abs((measured - 1) / sum(likely[1:]) - 1) < 0.05


def test_scores_are_log_probabilities_and_never_above_zero():
    scores = jnp.array([[1.0, 3.0, -jnp.inf, 2.0], [90.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    found = best_children(scores, 2)
    assert found.tokens[0].tolist() == [1, 3]
    expected = np.array([3.0, 2.0]) - np.log(np.exp([1.0, 3.0, 2.0]).sum())
    np.testing.assert_allclose(found.scores[0], expected, atol=1e-6)
    assert found.scores[1].tolist() == [0.0, -np.inf]
    assert best_children(scores, 1).tokens[:, 0].tolist() == [1, 0]
