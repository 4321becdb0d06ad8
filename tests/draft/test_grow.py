"""Growing a tree: the same nodes as EAGLE-2 written out in Python, over a draft whose law is a table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.grow import Children, Frontier, Level, best_children, grow
from jaxspec.draft.shape import StaticTree, TreeShape
from jaxspec.tree import DraftTree, node_depths, unpack_bits
from jaxspec.verify import longest_match

VOCAB = 12
BONUS = [3, 0, 7]
SHAPES = [TreeShape(3, 2, 6), TreeShape(5, 4, 8), TreeShape(4, 8, 32), TreeShape(3, 1, 4), TreeShape(1, 4, 5)]
PATHS = {
    # Of EAGLE-1's kind: wide at the top, deep along the best.
    "eagle": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0, 0)],
    "chain": [(0,), (0, 0), (0, 0, 0)],
    "second best only": [(1,), (1, 1)],
    "flat": [(0,), (3,)],
}
STATIC = {
    name: TreeShape(tree.num_steps, tree.topk, 1 + len(tree.paths), tree)
    for name, tree in ((name, StaticTree(tuple(paths))) for name, paths in PATHS.items())
}


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
    num_slots = (shape.num_steps - 1) * shape.width
    levels = []

    def children(path_sum: jax.Array, tokens: jax.Array) -> Children:
        scores = table[path_sum % 2, tokens]
        if normalised or shape.topk == 1:
            return best_children(scores, shape)
        kept, chosen = jax.lax.top_k(scores, shape.topk)
        return Children(chosen.astype(jnp.int32), kept)

    def run(frontier: Frontier) -> Level:
        ids = 100 * (frontier.depth + 1) + jnp.arange(shape.width, dtype=jnp.int32)
        ids = jnp.broadcast_to(ids, frontier.tokens.shape)
        visible = unpack_bits(frontier.ancestors, num_slots + shape.width)
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


@pytest.mark.parametrize("name", STATIC)
def test_a_static_tree_has_the_form_it_was_given(name):
    """Each node is the child of the rank that its path says, and its parent the node that its path begins with."""
    shape, law = STATIC[name], random_law(1)
    tree, levels = grow_by_table(law, shape)
    assert shape.static is not None
    paths = [(), *shape.static.paths]
    for row, bonus in enumerate(BONUS):
        parents = tree.parents[row].tolist()
        found: dict[tuple[int, ...], list[int]] = {}
        for node in range(len(paths)):
            path, place = [], node
            while place >= 0:
                path.append(int(tree.tokens[row, place]))
                place = parents[place]
            found[tuple(path[::-1])] = parents
        expected = set()
        for path in paths:
            tokens = [bonus]
            for rank in path:
                scores = law[sum(tokens) % 2, tokens[-1]]
                tokens.append(int(np.argsort(-scores, kind="stable")[rank]))
            expected.add(tuple(tokens))
        assert set(found) == expected
        assert all(parent < place for place, parent in enumerate(parents))
    for depth, (tokens, _, rows, visible) in enumerate(levels):
        assert tokens.shape[1] == shape.width
        assert (visible.sum(axis=-1) == depth + 1).all()
        assert rows.shape[1] == visible.shape[2]


@pytest.mark.parametrize("shape", [TreeShape(4, 8, 32), STATIC["eagle"]], ids=["dynamic", "static"])
def test_a_calibrated_drafts_scores_predict_how_much_is_accepted(shape):
    """Sequences are drawn from the law that the draft knows: each node is accepted as often as its score says."""
    rng, num_rows = np.random.default_rng(0), 4096
    law = random_law(2)[0]
    table, probs = jnp.asarray(law, jnp.float32), np.exp(law)
    text = np.zeros((num_rows, shape.num_steps + 2), np.int32)
    text[:, 0] = rng.integers(0, VOCAB, num_rows)
    for step in range(shape.num_steps + 1):
        cumulative = np.cumsum(probs[text[:, step]], axis=1)
        text[:, step + 1] = np.minimum((rng.random((num_rows, 1)) > cumulative).sum(axis=1), VOCAB - 1)
    bonus = jnp.asarray(text[:, 0])

    def run(frontier: Frontier) -> Level:
        return Level(best_children(table[frontier.tokens], shape), jnp.zeros((1, *frontier.tokens.shape)), ())

    room = jnp.zeros((1, num_rows, (shape.num_steps - 1) * shape.width))
    tree = jax.jit(lambda: grow(bonus, best_children(table[bonus], shape), (), room, shape, run))()
    depth = node_depths(tree.parents, shape.num_steps)
    drawn = jnp.take_along_axis(jnp.asarray(text), depth + 1, axis=1)
    _, accepted = longest_match(tree, drawn, shape.num_steps + 1)
    assert tree.scores is not None
    predicted = float(jnp.exp(tree.scores[:, 1:]).sum(axis=1).mean())
    assert predicted > 1.2
    assert float(accepted.mean()) == pytest.approx(predicted, rel=0.05)


def test_scores_are_log_probabilities_and_never_above_zero():
    scores = jnp.array([[1.0, 3.0, -jnp.inf, 2.0], [90.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    found = best_children(scores, TreeShape(1, 2, 3))
    assert found.tokens[0].tolist() == [1, 3]
    expected = np.array([3.0, 2.0]) - np.log(np.exp([1.0, 3.0, 2.0]).sum())
    np.testing.assert_allclose(found.scores[0], expected, atol=1e-6)
    assert found.scores[1].tolist() == [0.0, -np.inf]
    assert best_children(scores, TreeShape(1, 1, 2)).tokens[:, 0].tolist() == [1, 0]
