"""Uniting trees: shared prefixes become one, and the best nodes are kept, against a trie in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.unite import unite_trees
from jaxspec.tree import DraftTree

DEPTH, VOCAB, NUM_ROWS = 4, 3, 40
jit_unite = jax.jit(unite_trees, static_argnames=("depth", "num_nodes"))


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    """Trees without equal siblings, of depth at most DEPTH; scores fall along every path; some nodes hold no draft."""
    tokens = np.full((NUM_ROWS, num_nodes), -1, np.int32)
    parents = np.full((NUM_ROWS, num_nodes), -1, np.int32)
    scores = np.zeros((NUM_ROWS, num_nodes), np.float32)
    for row in range(NUM_ROWS):
        depth = [0] * num_nodes
        tokens[row, 0] = row % VOCAB
        for node in range(1, num_nodes):
            parent = int(rng.choice([other for other in range(node) if depth[other] < DEPTH]))
            taken = {int(tokens[row, other]) for other in range(1, node) if parents[row, other] == parent}
            free = [token for token in range(VOCAB) if token not in taken]
            is_draft = free and (parent == 0 or tokens[row, parent] >= 0) and rng.random() < 0.9
            tokens[row, node] = rng.choice(free) if is_draft else -1
            parents[row, node], depth[node] = parent, depth[parent] + 1
            # Few values, so that many tie; a node without a draft is below all.
            scores[row, node] = scores[row, parent] - rng.integers(0, 3) if is_draft else -np.inf
    return DraftTree(jnp.asarray(tokens), jnp.asarray(parents), jnp.asarray(scores))


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...] | None]:
    """Each node's tokens below the root; None where it or a node above it holds no draft."""
    paths: list[tuple[int, ...] | None] = [()]
    for node in range(1, tree.tokens.shape[1]):
        above = paths[int(tree.parents[row, node])]
        token = int(tree.tokens[row, node])
        paths.append(None if above is None or token < 0 else (*above, token))
    return paths


@pytest.mark.parametrize("num_nodes", [4, 9, 20])
def test_equal_paths_become_one_and_the_best_nodes_are_kept(num_nodes):
    rng = np.random.default_rng(num_nodes)
    trees = [random_tree(rng, 6), random_tree(rng, 9)]
    united = jit_unite(trees, depth=DEPTH, num_nodes=num_nodes)
    scores = [np.asarray(tree.scores) for tree in (*trees, united)]
    assert united.tokens.shape == united.parents.shape == (NUM_ROWS, num_nodes)
    for row in range(NUM_ROWS):
        best: dict[tuple[int, ...], tuple[float, int]] = {}
        index = 0
        for tree, own in zip(trees, scores):
            for node, path in enumerate(paths_of(tree, row)[1:], start=1):
                index += 1
                if path is not None:
                    score, first = best.get(path, (-np.inf, index))
                    best[path] = (max(score, float(own[row, node])), first)
        kept = sorted(best, key=lambda path: (-best[path][0], best[path][1]))[: num_nodes - 1]
        found = paths_of(united, row)
        assert [path for path in found[1:] if path is not None] == sorted(kept, key=lambda path: best[path][1])
        for node, path in enumerate(found[1:], start=1):
            if path is not None:
                assert float(scores[-1][row, node]) == best[path][0]
            assert 0 <= int(united.parents[row, node]) < node
        assert int(united.tokens[row, 0]) == row % VOCAB


def test_trees_without_scores_are_refused():
    tree = random_tree(np.random.default_rng(0), 4)
    with pytest.raises(ValueError, match="without scores"):
        unite_trees([tree, tree._replace(scores=None)], depth=DEPTH, num_nodes=5)
