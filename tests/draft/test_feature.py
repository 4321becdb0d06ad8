"""A head's chain and tree: the index contract, seen by heads that are right only under it, and the head's cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.draft.base import CacheShape, DraftSettings, Observation
from jaxspec.draft.feature import Feature
from jaxspec.draft.grow import TreeShape
from jaxspec.models.heads import Head, HeadOutput
from jaxspec.models.network import Network
from jaxspec.runner import Runner
from jaxspec.state import DraftState, Rows
from tests import planted
from tests.dense_head import DenseHead
from tests.tiny import chain, make_runner, prefill_prompts, tiny_config, tiny_head

NUM_ROWS, MAX_LEN, CHUNK, PAGE_SIZE, TABLE_WIDTH = 2, 64, 8, 4, 16
TABLE = np.random.default_rng(0).permutation(NUM_ROWS * TABLE_WIDTH).reshape(NUM_ROWS, TABLE_WIDTH).astype(np.int32)
PROMPTS = [[0, 5, 12, 3, 7, 1], [9, 2, 6, 5, 3, 15, 8, 9, 7, 14, 3]]  # one chunk, and two
HEADS = {"eagle": planted.planted_eagle, "eagle3": planted.planted_eagle3}
CHAIN, WIDE, DEEP = chain(3), TreeShape(3, 2, 6), TreeShape(5, 4, 8)
NUM_ROUNDS = 6

Leaves = tuple[jax.Array, ...]


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
        # A method's own functions, so that those of a subclass are traced.
        self.jit_propose, self.jit_observe = jax.jit(method.propose), jax.jit(method.observe)

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
        self.state = self.jit_observe(self.leaves, self.state, self.rows, TABLE, observation)

    def prefill(self) -> None:
        """Feeds prompts in chunks; a row whose prompt has ended waits."""
        while self.lengths != [len(prompt) for prompt in PROMPTS]:
            self.observe([min(CHUNK, len(prompt) - length) for prompt, length in zip(PROMPTS, self.lengths)])

    def propose(self) -> list[list[list[int]]]:
        """For each row, the path of drafts that ends at each node."""
        tree = self.jit_propose(self.leaves, self.state, self.rows, TABLE)
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
    held = [np.asarray(pool)[0, TABLE].transpose(0, 1, 3, 2, 4).reshape(shape) for pool in fed.state.caches[0]]
    for row, length in enumerate(fed.lengths):
        dense = DenseHead(fed.method.network, fed.leaves)
        for place in range(length):
            hidden = dense.fuse([leaf[row, place] for leaf in fed.features])
            dense.run(fed.texts[row][place + 1], hidden, place, list(range(place)))
        for ours, expected in zip(held, (dense.keys, dense.values)):
            np.testing.assert_allclose(ours[row, :length], np.array(expected), atol=1e-5, rtol=1e-5)
            assert not ours[row, length:].any()


@pytest.mark.parametrize("shape", [CHAIN, DEEP], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["eagle", "eagle3"])
def test_any_outcome_leaves_the_cache_of_one_pass(fused, shape):
    """Prompts in chunks, then rounds of every outcome and rows that do not run; the features are random."""
    switches = {"fc_norm": True, "norm_before_residual": True, "draft_vocab": 20} if fused else {}
    layer = tiny_config(num_hidden_layers=1, vocab_size=24, hidden_size=16)
    network, leaves = tiny_head(5, fused=fused, layer=layer, **switches)
    rng = np.random.default_rng(2)
    features = tuple(rng.normal(0, 1, (NUM_ROWS, MAX_LEN, 16)).astype(np.float32) for _ in network.config.capture)
    fed = Fed(Feature(network, shape), leaves, [[*prompt, 4] for prompt in PROMPTS], features)
    fed.prefill()
    check_cache(fed)
    steps = shape.num_steps
    outcomes: list[list[int | None]] = [[0, steps], [steps, None], [1, 0], [None, steps - 1], [steps, 0], [2, 1]]
    for outcome in outcomes:
        drafted, counts = fed.propose(), []
        for row, matched in enumerate(outcome):
            # The last path of the tree that is so long; a row that does not run commits nothing.
            lengths = [] if matched is None else [path for path in drafted[row] if len(path) <= matched]
            path = max(lengths, key=len, default=[])
            fed.texts[row] += [] if matched is None else [*path, 23]
            counts.append(0 if matched is None else len(path) + 1)
        fed.observe(counts)
    check_cache(fed)


@functools.cache
def known_texts() -> list[list[int]]:
    """The planted target's greedy texts, and more of them than rounds can commit."""
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        while len(text) < MAX_LEN:
            text.append(planted.next_token(text))
    return texts


@functools.cache
def known_states() -> dict[int | str, np.ndarray]:
    """What the planted target lets a head read, over the whole of its texts."""
    network, leaves = planted.planted_target()
    names = (*range(planted.NUM_LAYERS), "normed")

    @jax.jit
    def whole_pass(leaves: Leaves, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        model = network.bind(leaves)
        positions = jnp.broadcast_to(jnp.arange(MAX_LEN, dtype=jnp.int32), tokens.shape)
        nothing = jnp.zeros(NUM_ROWS, jnp.int32)
        caches = network.init_cache(num_pages=1, page_size=PAGE_SIZE, dtype=jnp.dtype("float32"))
        block = Block(positions, nothing, jnp.full((NUM_ROWS, 1), -1))
        out = model.extend(tokens, block, caches, capture=names)
        return jnp.argmax(model.logits(out.hidden), axis=-1), out.captured

    texts = np.array(known_texts())
    best, states = whole_pass(leaves, jnp.asarray(texts))
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(best[row, len(prompt) - 1 : -1], texts[row, len(prompt) :])
    return {name: np.asarray(state) for name, state in zip(names, states)}


def accept_length(method: Feature, leaves: Leaves) -> float:
    """Tokens per round over the planted target's known texts."""
    fed = Fed(method, leaves, known_texts(), tuple(known_states()[name] for name in method.capture))
    fed.rows = fed.rows._replace(sampling=Rows.zeros(NUM_ROWS, MAX_LEN, 1).sampling)
    fed.prefill()
    emitted = 0
    for _ in range(NUM_ROUNDS):
        counts = []
        for row, paths in enumerate(fed.propose()):
            behind = fed.texts[row][fed.lengths[row] + 1 :]
            counts.append(1 + max(len(path) for path in paths if path == behind[: len(path)]))
        fed.observe(counts)
        emitted += sum(counts)
    return emitted / (NUM_ROUNDS * NUM_ROWS)


class _IdShift(Feature):
    """Pairs each hidden state with its own token, not the one after it."""

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        return super().observe(params, state, rows, table, seen._replace(next_tokens=seen.tokens))


class _StaleCache(Feature):
    """Leaves out of the cache what a round committed behind its first token."""

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        new = super().observe(params, state, rows, table, seen)
        first = super().observe(params, state, rows, table, seen._replace(count=jnp.minimum(seen.count, 1)))
        in_round = rows.seq_len[0] > len(PROMPTS[0])
        caches = jax.tree.map(lambda stale, whole: jnp.where(in_round, stale, whole), first.caches, new.caches)
        return new._replace(caches=caches)


class _Shifted(Head):
    """Counts positions of drafts from another origin than those of committed pairs."""

    def extend(self, tokens, hidden, block: Block, caches, *, earlier=None) -> HeadOutput:
        if earlier is not None:
            block = block._replace(positions=block.positions - 1)
        return super().extend(tokens, hidden, block, caches, earlier=earlier)


@dataclasses.dataclass(frozen=True)
class _Reads(Feature):
    """Reads other states of the target than the head was made for."""

    wrong: tuple[int | str, ...] = ()

    @property
    def capture(self) -> tuple[int | str, ...]:
        return self.wrong


def swap_halves(network: Network, leaves: Leaves, *names: str) -> Leaves:
    """The weights of a head that expects the other order of what is concatenated before projections `names`."""
    head = network.bind(leaves)
    for name in names:
        linear = head.fc if name == "fc" else getattr(head.layer.self_attn, name)
        linear.weight[...] = jnp.concatenate(jnp.split(linear.weight[...], 2)[::-1])
    return planted.split(head)[1]


def offsets_for_ids(leaves: Leaves) -> Leaves:
    """The vocabulary map as a checkpoint stores it, offsets, taken for ids."""
    offsets = jnp.asarray(planted.DRAFT_IDS - np.arange(len(planted.DRAFT_IDS)), jnp.int32)
    return tuple(offsets if leaf.dtype == jnp.int32 else leaf for leaf in leaves)


def breaches(name: str) -> dict[str, tuple[Feature, Leaves]]:
    """Every wrong reading of the contract, each with an otherwise right head."""
    network, leaves = HEADS[name]()
    right = Feature(network, CHAIN)
    shifted = planted.split(planted.bare_head(network.config, _Shifted))[0]
    found: dict[str, tuple[Feature, Leaves]] = {
        "token ids shifted": (_IdShift(network, CHAIN), leaves),
        "stale cache": (_StaleCache(network, CHAIN), leaves),
        "positions from another origin": (Feature(shifted, CHAIN), leaves),
    }
    if name == "eagle":
        found["state before the norm"] = (_Reads(network, CHAIN, (planted.NUM_LAYERS - 1,)), leaves)
        found["order of embedding and hidden"] = (right, swap_halves(network, leaves, "fc"))
    else:
        found["layers off by one"] = (_Reads(network, CHAIN, (1, 2)), leaves)
        found["order of layers"] = (_Reads(network, CHAIN, (1, 0)), leaves)
        found["order of embedding and hidden"] = (right, swap_halves(network, leaves, "q_proj", "k_proj", "v_proj"))
        found["offsets taken for ids"] = (right, offsets_for_ids(leaves))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_each_breach_of_the_contract_costs_acceptance(name):
    """Nothing else would show it: the output is right all the same."""
    assert min(len(set(text)) for text in known_texts()) > 4
    network, leaves = HEADS[name]()
    assert accept_length(Feature(network, CHAIN), leaves) == CHAIN.num_steps + 1
    lengths = {breach: accept_length(*args) for breach, args in breaches(name).items()}
    assert max(lengths.values()) <= CHAIN.num_steps, lengths


@functools.cache
def runner_of(name: str, shape: TreeShape) -> Runner:
    network, leaves = HEADS[name]()
    return make_runner(
        planted.planted_target(),
        Feature(network, shape),
        leaves,
        num_rows=NUM_ROWS,
        page_size=PAGE_SIZE,
        num_pages=TABLE.size,
        max_model_len=MAX_LEN,
    )


@pytest.mark.parametrize("temperature", [0.0, 20.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "shape"), [("eagle", CHAIN), ("eagle3", CHAIN), ("eagle3", DEEP)], ids=str)
def test_a_head_that_copies_the_target_is_accepted_whole_inside_the_compiled_round(name, shape, temperature):
    """The margin of 20 makes sampled tokens vary at this temperature, and a tree may then prefer other branches."""
    runner = runner_of(name, shape)
    prefill_prompts(runner, PROMPTS, TABLE, CHUNK, temperature)
    counts = []
    for _ in range(NUM_ROUNDS):
        verdict = runner.decode(np.arange(NUM_ROWS, dtype=np.int32), TABLE)
        counts += np.asarray(verdict.count)[0].tolist()
    history, lengths = np.asarray(runner.state.rows.history), np.asarray(runner.state.rows.seq_len)
    texts = [history[row, : lengths[row]].tolist() for row in range(NUM_ROWS)]
    is_known = texts == [text[: len(own)] for text, own in zip(known_texts(), texts)]
    assert is_known == (temperature == 0)
    if temperature == 0 or shape.topk == 1:
        assert counts == [shape.num_steps + 1] * len(counts)
    assert min(counts) > 1


def test_a_head_is_needed():
    settings = DraftSettings(num_steps=5, eagle_topk=4, num_draft_tokens=8, ngram_min_match=1, ngram_max_match=3)
    with pytest.raises(ValueError, match="draft_model"):
        Feature.create(settings, None, planted.VOCAB)
    method = Feature.create(settings, planted.planted_eagle3()[0], planted.VOCAB)
    assert (method.num_steps, method.num_draft_tokens, method.is_chain, method.capture) == (5, 8, False, (0, 1))
