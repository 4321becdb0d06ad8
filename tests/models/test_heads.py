"""Draft heads against a NumPy head that runs one pair at a time, through `observe` and `propose` and a paged cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.base import CacheShape, Observation
from jaxspec.draft.feature import Feature
from jaxspec.draft.shape import TreeShape
from jaxspec.models.config import ModelConfig
from jaxspec.models.heads import Head
from jaxspec.state import Rows
from tests.dense_head import DenseHead
from tests.tiny import chain, tiny_config, tiny_head

VOCAB, PAGE_SIZE, TABLE = 24, 4, jnp.array([[5, 2, 7, 0, 3, 6]])
WIDTH = 6  # of an observation's arrays
CHAIN, TREE = chain(4), TreeShape(3, 3, 9)
ALL: dict[str, Any] = {"norm_before_residual": True, "fc_norm": True, "norm_before_fc": True, "feed_normed": True}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"fused": False},
    "eagle without bias": {"fused": False, "fc_bias": False},
    "eagle from another width of embedding": {"fused": False, "target_embed": 12},
    "eagle3": {"fused": True},
    "normed residual": {"fused": True, "norm_before_residual": True},
    "norm for each layer": {"fused": True, "fc_norm": True},
    "norm before fc": {"fused": True, "norm_before_fc": True},
    "normed feature fed": {"fused": True, "feed_normed": True},
    "no final norm": {"fused": True, "final_norm": False},
    "normed feature fed, no final norm": {"fused": True, "final_norm": False, "feed_normed": True},
    "tied": {"fused": True, "lm_head": "embedding"},
    "table of the target": {"fused": False, "lm_head": "table"},
    "draft vocabulary": {"fused": True, "draft_vocab": 17},
    "target of another width": {"fused": True, "target_hidden": 20},
    "eagle3 from another width of embedding": {"fused": True, "target_embed": 12},
    "one layer": {"fused": True, "capture": (1,), "target_hidden": 20},
    "four layers": {"fused": True, "capture": (0, 1, 3, 2)},
    "everything": {"fused": True, **ALL, "draft_vocab": 17, "capture": (0, 2, 3, 1), "target_hidden": 12},
}


def layer_config() -> ModelConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": VOCAB}
    return tiny_config(**sizes, rms_norm_eps=0.01)


@pytest.fixture
def made(monkeypatch) -> list[np.ndarray]:
    """The logits [N, V] that heads make, in order; values, because nothing is traced here."""
    found: list[np.ndarray] = []
    logits = Head.logits

    def keep(self: Head, state: jax.Array) -> jax.Array:
        out = logits(self, state)
        found.append(np.asarray(out[0]))
        return out

    monkeypatch.setattr(Head, "logits", keep)
    return found


class Pair:
    """A head under test and its reference, fed one row's text; the target's features are random."""

    def __init__(self, shape: TreeShape, settings: dict[str, Any], made: list[np.ndarray]):
        network, self.leaves = tiny_head(4, layer=layer_config(), **settings)
        self.config, self.shape, self.made = network.config, shape, made
        self.method, self.dense = Feature(network, shape), DenseHead(network, self.leaves)
        self.state = self.method.init(CacheShape(1, 8, PAGE_SIZE, jnp.dtype("float32")))
        self.rng = np.random.default_rng(1)
        self.text: list[int] = []
        self.fed, self.first = np.zeros(0), np.zeros(0)  # of the reference's last pair
        self.rows = Rows.zeros(1, 32, 1)._replace(active=jnp.ones(1, bool))

    @property
    def num_pairs(self) -> int:
        """Pairs of committed tokens: every token but the first has one."""
        return max(len(self.text) - 1, 0)

    def observe(self, tokens: list[int]) -> None:
        """Commits the text up to here and takes `tokens` behind it; compares the first proposals' logits."""
        start, self.text = self.num_pairs, self.text + tokens
        count = self.num_pairs - start
        size = (WIDTH, self.config.target_hidden)
        features = [self.rng.normal(0, 1, size).astype(np.float32) for _ in self.config.capture]
        after = np.full(WIDTH, 7, np.int32)
        after[:count] = self.text[start + 1 :]
        self.rows = self.rows._replace(seq_len=jnp.array([self.num_pairs]), bonus=jnp.array(self.text[-1:]))
        # The head reads what follows each token; the token itself is in the feature.
        seen = Observation(
            tokens=jnp.full((1, WIDTH), 3),
            next_tokens=jnp.array(after[None]),
            count=jnp.array([count]),
            start=jnp.array([start]),
            features=tuple(jnp.array(feature[None]) for feature in features),
        )
        self.made.clear()
        self.state = self.method.observe(self.leaves, self.state, self.rows, TABLE, seen)
        for offset in range(count):
            hidden = self.dense.fuse([feature[offset] for feature in features])
            position = start + offset
            self.fed, self.first = self.dense.run(int(after[offset]), hidden, position, list(range(position)))
        check_logits(self.made, [[self.first]])

    def propose(self) -> list[int]:
        """Compares the logits of every level and returns the first path of drafts."""
        self.made.clear()
        tree = self.method.propose(self.leaves, self.state, self.rows, TABLE)
        assert tree.tokens[0, 0] == self.text[-1]
        levels, path = self._expected_levels()
        check_logits(self.made, levels)
        if self.shape.topk == 1:
            assert tree.tokens[0, 1:].tolist() == path
        # Drafts leave nothing behind.
        del self.dense.keys[self.num_pairs :], self.dense.values[self.num_pairs :]
        return path

    def _expected_levels(self) -> tuple[list[list[np.ndarray]], list[int]]:
        """Logits of each level's nodes, and a path of the most likely tokens; a node is (score, token, fed, pairs)."""
        num_pairs, topk = self.num_pairs, self.shape.topk
        frontier = self._children(0.0, self.first, self.fed, list(range(num_pairs)))
        levels, path = [], [frontier[0][1]]
        for depth in range(self.shape.num_steps - 1):
            level, found = [], []
            for score, token, fed, seen in frontier:
                fed, logits = self.dense.run(token, fed, num_pairs + depth, seen)
                level.append(logits)
                found += self._children(score, logits, fed, [*seen, len(self.dense.keys) - 1])
            levels.append(level)
            path.append(found[0][1])
            frontier = sorted(found, key=lambda node: -node[0])[:topk]
        return levels, path

    def _children(self, score: float, logits: np.ndarray, fed: np.ndarray, seen: list[int]) -> list[tuple]:
        logprobs = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-logprobs)[: self.shape.topk]
        return [(score + logprobs[token], int(token), fed, seen) for token in best]


def check_logits(made: list[np.ndarray], expected: list[list[np.ndarray]]) -> None:
    assert len(made) == len(expected)
    for ours, level in zip(made, expected):
        np.testing.assert_allclose(ours, np.stack(level), atol=2e-5, rtol=0)


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_logits_are_the_reference_heads(shape, settings, made):
    """A prompt in two chunks, then rounds that accept nothing, a part and everything; every step of each."""
    with jax.disable_jit():  # so that logits are values, and nothing is compiled
        pair = Pair(shape, settings, made)
        pair.observe(pair.rng.integers(0, VOCAB, 5).tolist())
        pair.observe(pair.rng.integers(0, VOCAB, 2).tolist())
        for accepted in (0, 2, shape.num_steps):
            path = pair.propose()
            other = (path[accepted] + 1) % VOCAB if accepted < len(path) else 9
            pair.observe([*path[:accepted], other])
        pair.propose()


def test_tokens_outside_the_draft_vocabulary_are_impossible():
    network, leaves = tiny_head(2, fused=True, layer=layer_config(), draft_vocab=17)
    head = network.bind(leaves)
    logits = np.asarray(head.logits(jnp.ones((2, 16))))
    assert logits.shape == (2, VOCAB)
    assert set(np.flatnonzero(np.isfinite(logits[0]))) == set(np.asarray(head.target_ids[...]).tolist())
