"""A feature-level method whose target is the test, over two rows and a paged cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draft.base import CacheShape, Observation
from jaxspec.draft.feature import Feature
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree
from tests.dense_head import DenseHead

NUM_ROWS, MAX_LEN, CHUNK, PAGE_SIZE, TABLE_WIDTH = 2, 64, 8, 4, 16
TABLE = np.random.default_rng(0).permutation(NUM_ROWS * TABLE_WIDTH).reshape(NUM_ROWS, TABLE_WIDTH).astype(np.int32)
PROMPTS = [[0, 5, 12, 3, 7, 1], [9, 2, 6, 5, 3, 15, 8, 9, 7, 14, 3]]  # one chunk, and two

Leaves = tuple[jax.Array, ...]


@functools.cache
def compiled(method: Feature) -> tuple[Callable[..., DraftTree], Callable[..., DraftState]]:
    """Its propose and observe; equal methods share them."""
    return jax.jit(method.propose), jax.jit(method.observe)


class Fed:
    """A method whose target is the test: it knows the texts, or makes the verdicts up.

    `features` holds, for each state that the method captures, [NUM_ROWS, MAX_LEN, width].
    """

    def __init__(self, method: Feature, leaves: Leaves, texts: list[list[int]], features: tuple[np.ndarray, ...]):
        self.method, self.leaves, self.texts, self.features = method, leaves, texts, features
        self.state = method.init(CacheShape(NUM_ROWS, TABLE.size, PAGE_SIZE, jnp.dtype("float32")))
        zeros = Rows.zeros(NUM_ROWS, MAX_LEN, 1)
        sampling = zeros.sampling._replace(temperature=jnp.array([0.0, 1.0]), seed=jnp.ones((2, 2), jnp.uint32))
        self.rows = zeros._replace(active=jnp.ones(NUM_ROWS, bool), sampling=sampling)
        self.lengths = [0] * NUM_ROWS  # committed tokens; the one behind them is the bonus

    def observe(self, counts: list[int]) -> None:
        """Commits `counts` more tokens of the texts; what lies behind them in the arrays is garbage."""
        tokens, after = np.full((2, NUM_ROWS, CHUNK), 13, np.int32)
        seen = tuple(np.full((NUM_ROWS, CHUNK, leaf.shape[-1]), 9, np.float32) for leaf in self.features)
        starts = self.lengths
        for row, (start, count) in enumerate(zip(starts, counts)):
            tokens[row, :count] = self.texts[row][start : start + count]
            after[row, :count] = self.texts[row][start + 1 : start + 1 + count]
            for ours, leaf in zip(seen, self.features):
                ours[row, :count] = leaf[row, start : start + count]
        self.lengths = [start + count for start, count in zip(starts, counts)]
        bonus = [text[length] for text, length in zip(self.texts, self.lengths)]
        self.rows = self.rows._replace(seq_len=jnp.array(self.lengths), bonus=jnp.array(bonus))
        committed = jnp.array(tokens), jnp.array(after), jnp.array(counts), jnp.array(starts)
        observation = Observation(*committed, tuple(map(jnp.array, seen)))
        self.state = self.take_in(observation)

    def take_in(self, seen: Observation) -> DraftState:
        """The state after an observation."""
        return compiled(self.method)[1](self.leaves, self.state, self.rows, TABLE, seen)

    def prefill(self) -> None:
        """Feeds prompts in chunks; a row whose prompt has ended waits."""
        while self.lengths != [len(prompt) for prompt in PROMPTS]:
            self.observe([min(CHUNK, len(prompt) - length) for prompt, length in zip(PROMPTS, self.lengths)])

    def propose(self) -> list[list[list[int]]]:
        """For each row, the path of drafts that ends at each node."""
        tree = compiled(self.method)[0](self.leaves, self.state, self.rows, TABLE)
        found = []
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
            assert tokens[0] == self.texts[row][self.lengths[row]]
            paths: list[list[int]] = [[]]
            for token, parent in zip(tokens[1:], parents[1:]):
                paths.append([*paths[parent], token])
            found.append(paths)
        return found


def check_cache(fed: Fed) -> None:
    """The pages hold the keys and values of one pass over the texts with the target's features, and nothing else."""
    layer = fed.method.network.config.layer
    shape = (NUM_ROWS, TABLE_WIDTH * PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
    pools = map(np.asarray, jax.tree.leaves(fed.state.caches[0]))
    held = [pool[0, TABLE].transpose(0, 1, 3, 2, 4).reshape(shape) for pool in pools]
    for row, length in enumerate(fed.lengths):
        dense = DenseHead(fed.method.network, fed.leaves)
        for place in range(length):
            hidden = dense.fuse([leaf[row, place] for leaf in fed.features])
            dense.run(fed.texts[row][place + 1], hidden, place, list(range(place)))
        for ours, expected in zip(held, (dense.keys, dense.values)):
            np.testing.assert_allclose(ours[row, :length], np.array(expected), atol=1e-5, rtol=1e-5)
            assert not ours[row, length:].any()
