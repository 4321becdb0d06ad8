"""A head's chain and tree: the index contract, seen by heads that are right only under it, and the head's cache."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.draft.base import DraftSettings, Noise, Observation
from jaxspec.draft.feature import Feature
from jaxspec.draft.shape import TreeShape
from jaxspec.models.heads import Head, HeadOutput
from jaxspec.models.network import Network
from jaxspec.runner import Runner
from jaxspec.state import DraftState, Rows
from tests import planted
from tests.draft.fed import CHUNK, MAX_LEN, NUM_ROWS, PAGE_SIZE, PROMPTS, TABLE, Fed, Leaves, check_cache
from tests.tiny import chain, make_runner, prefill_prompts, tiny_config, tiny_head

HEADS = {"eagle": planted.planted_eagle, "eagle3": planted.planted_eagle3}
CHAIN, WIDE, DEEP = chain(3), TreeShape(3, 2, 6), TreeShape(5, 4, 8)
NUM_ROUNDS = 6


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


class IdShift(Fed):
    """Pairs each hidden state with its own token, not the one after it."""

    def take_in(self, seen: Observation) -> DraftState:
        return super().take_in(seen._replace(next_tokens=seen.tokens))


class StaleCache(Fed):
    """Leaves out of the cache what a round committed behind its first token."""

    def take_in(self, seen: Observation) -> DraftState:
        new = super().take_in(seen)
        if self.lengths[0] == len(PROMPTS[0]):
            return new  # still in the prompts
        return new._replace(caches=super().take_in(seen._replace(count=jnp.minimum(seen.count, 1))).caches)


class Shifted(Head):
    """Counts positions of drafts from another origin than those of committed pairs."""

    def extend(self, tokens, hidden, block: Block, caches, *, earlier=None) -> HeadOutput:
        if earlier is not None:
            block = block._replace(positions=block.positions - 1)
        return super().extend(tokens, hidden, block, caches, earlier=earlier)


class Reading(NamedTuple):
    """One way to read the contract; `capture` None is what the head was made for."""

    method: Feature
    leaves: Leaves
    capture: tuple[int | str, ...] | None = None
    kind: type[Fed] = Fed


def accept_length(reading: Reading) -> float:
    """Tokens per round over the planted target's known texts."""
    method = reading.method
    features = tuple(known_states()[name] for name in reading.capture or method.capture)
    fed = reading.kind(method, reading.leaves, known_texts(), features)
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


def breaches(name: str) -> dict[str, Reading]:
    """Every wrong reading of the contract, each with an otherwise right head."""
    network, leaves = HEADS[name]()
    right = Feature(network, CHAIN)
    shifted = planted.split(planted.bare_head(network.config, Shifted))[0]
    found = {
        "token ids shifted": Reading(right, leaves, kind=IdShift),
        "stale cache": Reading(right, leaves, kind=StaleCache),
        "positions from another origin": Reading(Feature(shifted, CHAIN), leaves),
    }
    if name == "eagle":
        found["state before the norm"] = Reading(right, leaves, (planted.NUM_LAYERS - 1,))
        found["order of embedding and hidden"] = Reading(right, swap_halves(network, leaves, "fc"))
    else:
        swapped = swap_halves(network, leaves, "q_proj", "k_proj", "v_proj")
        found["layers off by one"] = Reading(right, leaves, (1, 2))
        found["order of layers"] = Reading(right, leaves, (1, 0))
        found["order of embedding and hidden"] = Reading(right, swapped)
        found["offsets taken for ids"] = Reading(right, offsets_for_ids(leaves))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_each_breach_of_the_contract_costs_acceptance(name):
    """Nothing else would show it: the output is right all the same."""
    assert min(len(set(text)) for text in known_texts()) > 4
    network, leaves = HEADS[name]()
    assert accept_length(Reading(Feature(network, CHAIN), leaves)) == CHAIN.num_steps + 1
    lengths = {breach: accept_length(reading) for breach, reading in breaches(name).items()}
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
    """But for tokens that it does not have: at this temperature a margin of 20 lets the target draw them too.

    A sampled tree may prefer other branches, and holds the head's own draw of the first token all the same.
    """
    runner = runner_of(name, shape)
    prefill_prompts(runner, PROMPTS, TABLE, CHUNK, temperature)
    own = planted.DRAFT_IDS if name == "eagle3" else np.arange(planted.VOCAB)
    whole = shape.num_steps + 1
    lacked = 0
    for _ in range(NUM_ROUNDS):
        verdict = runner.decode(np.arange(NUM_ROWS, dtype=np.int32), TABLE)
        for tokens, count in zip(np.asarray(verdict.tokens)[0], np.asarray(verdict.count)[0].tolist()):
            last_is_lacked = tokens[count - 1] not in own
            lacked += last_is_lacked and count < whole
            assert np.isin(tokens[: count - 1], own).all()
            if temperature == 0 or shape.topk == 1:
                assert count == whole or last_is_lacked
            assert count > 1 or last_is_lacked
    assert (lacked > 0) == (temperature > 0 and name == "eagle3")
    history, lengths = np.asarray(runner.state.rows.history), np.asarray(runner.state.rows.seq_len)
    texts = [history[row, : lengths[row]].tolist() for row in range(NUM_ROWS)]
    is_known = texts == [known[: len(text)] for known, text in zip(known_texts(), texts)]
    assert is_known == (temperature == 0)


def test_a_head_is_needed():
    settings = DraftSettings(TreeShape(5, 4, 8), noise=Noise.SHARED, ngram_min_match=1, ngram_max_match=3)
    with pytest.raises(ValueError, match="draft_model"):
        Feature.create(settings, None, planted.VOCAB)
    method = Feature.create(settings, planted.planted_eagle3()[0], planted.VOCAB)
    assert (method.num_steps, method.num_draft_tokens, method.is_chain, method.capture) == (5, 8, False, (0, 1))
