"""A draft model's chain: its cache and its proposals are those of a pass over the whole text, whatever came before."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.context import Context
from jaxspec.draft.base import CacheShape, DraftSettings, Noise, Observation
from jaxspec.draft.standalone import Standalone
from jaxspec.models.network import Network
from jaxspec.runner import Runner
from jaxspec.sampling import draw
from jaxspec.state import Rows
from tests.tiny import VOCAB, chain, make_runner, prefill_prompts, tiny_model

NUM_ROWS, PAGE_SIZE, TABLE_WIDTH, MAX_LEN, CHUNK = 2, 4, 16, 64, 8
TABLE = np.random.default_rng(0).permutation(NUM_ROWS * TABLE_WIDTH).reshape(NUM_ROWS, TABLE_WIDTH).astype(np.int32)
TARGET = tiny_model(0)
DRAFTS = {1: tiny_model(1, num_hidden_layers=1), 2: TARGET}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]

jit_propose = jax.jit(Standalone.propose, static_argnums=0)
jit_observe = jax.jit(Standalone.observe, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def whole_pass(network: Network, leaves, tokens):
    """Logits [B, S, V] and pending keys and values of a pass over texts [B, S], from an empty cache."""
    model = network.bind(leaves)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    nothing = jnp.zeros(tokens.shape[0], jnp.int32)
    caches = network.init_cache(num_pages=1, page_size=PAGE_SIZE, dtype=jnp.dtype("float32"))
    out = model.extend(tokens, Block(positions, nothing, jnp.full((tokens.shape[0], 1), -1)), caches)
    return model.logits(out.hidden), out.pending


def padded(texts: list[list[int]]) -> np.ndarray:
    tokens = np.zeros((len(texts), MAX_LEN), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return tokens


@jax.jit
def next_tokens(logits, lengths, sampling):
    """What each row draws after `lengths` tokens, over the target's vocabulary."""
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[..., :VOCAB]
    last = jnp.pad(last, ((0, 0), (0, 0), (0, VOCAB - last.shape[-1])), constant_values=-jnp.inf)
    context = Context.of(Rows.zeros(last.shape[0], MAX_LEN, 1))  # nobody asks for what was said before
    return draw(last, lengths[:, None], sampling, context)[:, 0]


class Fed:
    """A draft method whose target is the test: it makes the verdicts up. Row 0 is greedy, row 1 drawn."""

    def __init__(self, method: Standalone, leaves: tuple[jax.Array, ...]):
        self.method, self.leaves = method, leaves
        self.state = method.init(CacheShape(NUM_ROWS, TABLE.size, PAGE_SIZE, jnp.dtype("float32")))
        self.texts: list[list[int]] = [[], []]
        zeros = Rows.zeros(NUM_ROWS, MAX_LEN, 1)
        sampling = zeros.sampling._replace(
            temperature=jnp.array([0.0, 1.0]), seed=jnp.array([[0, 0], [5, 6]], jnp.uint32)
        )
        self.rows = zeros._replace(active=jnp.ones(NUM_ROWS, bool), sampling=sampling)

    def observe(self, starts: list[int], counts: list[int]) -> None:
        """Commits `counts` tokens of the texts from `starts` on; the rest of the arrays is garbage."""
        tokens, after = np.full((2, NUM_ROWS, CHUNK), 33, np.int32)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[row, :count] = self.texts[row][start : start + count]
            after[row, :count] = self.texts[row][start + 1 : start + 1 + count]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        bonus = [text[end] for text, end in zip(self.texts, ends, strict=True)]
        self.rows = self.rows._replace(seq_len=jnp.array(ends), bonus=jnp.array(bonus))
        seen = Observation(jnp.array(tokens), jnp.array(after), jnp.array(counts), jnp.array(starts), ())
        self.state = jit_observe(self.method, self.leaves, self.state, self.rows, jnp.asarray(TABLE), seen)

    def prefill(self) -> None:
        """Feeds prompts in chunks; the last token of a text is the target's first."""
        self.texts = [[*prompt, 40 + row] for row, prompt in enumerate(PROMPTS)]
        starts = [0, 0]
        while any(start < len(prompt) for start, prompt in zip(starts, PROMPTS)):
            counts = [min(CHUNK, len(prompt) - start) for start, prompt in zip(starts, PROMPTS)]
            self.observe(starts, counts)
            starts = [start + count for start, count in zip(starts, counts)]

    def propose(self) -> list[list[int]]:
        tree = jit_propose(self.method, self.leaves, self.state, self.rows, jnp.asarray(TABLE))
        assert tree.tokens[:, 0].tolist() == [text[-1] for text in self.texts]
        return tree.tokens[:, 1:].tolist()

    def accept(self, drafts: list[list[int]], matched: list[int | None]) -> None:
        """The verdict of a round: so many drafts and another token; None is a row that did not run."""
        starts = [len(text) - 1 for text in self.texts]
        for row, count in enumerate(matched):
            if count is not None:
                other = (drafts[row][count] + 1) % VOCAB if count < len(drafts[row]) else 7
                self.texts[row] += [*drafts[row][:count], other]
        self.observe(starts, [0 if count is None else count + 1 for count in matched])

    def expected_drafts(self) -> list[list[int]]:
        """The chain by a whole pass for every token."""
        grown = [list(text) for text in self.texts]
        for _ in range(self.method.num_steps):
            logits, _ = whole_pass(self.method.network, self.leaves, padded(grown))
            drawn = next_tokens(logits, jnp.array([len(text) for text in grown]), self.rows.sampling)
            grown = [[*text, int(token)] for text, token in zip(grown, drawn)]
        return [text[len(old) :] for text, old in zip(grown, self.texts)]

    def check_cache(self) -> None:
        check_cache(self.method.network, self.leaves, self.state.caches[0], self.texts)


def check_cache(network: Network, leaves, cache, texts: list[list[int]]) -> None:
    """The pages hold the keys and values of one pass over the texts, and nothing behind their ends."""
    _, (pending,) = whole_pass(network, leaves, padded(texts))
    for pool, rows in zip(jax.tree.leaves(cache), pending, strict=True):
        # [L, B, K, pages, page_size, D] -> [L, B, S, K, D]
        held = np.asarray(pool)[:, TABLE].transpose(0, 1, 2, 4, 3, 5).reshape(rows.shape)
        for row, text in enumerate(texts):
            np.testing.assert_allclose(held[:, row, : len(text)], rows[:, row, : len(text)], atol=1e-5, rtol=1e-5)
            assert not held[:, row, len(text) :].any()


def check_rounds(method: Standalone, leaves: tuple[jax.Array, ...]) -> None:
    """Prefills in chunks, then rounds of every outcome; checks each proposal and the cache they leave."""
    steps = method.num_steps
    fed = Fed(method, leaves)
    fed.prefill()
    fed.check_cache()
    outcomes: list[list[int | None]] = [[0, steps], [steps, None], [steps // 2, 0], [None, steps - 1], [steps, 0]]
    for matched in outcomes:
        drafts = fed.propose()
        assert drafts == fed.expected_drafts()
        fed.accept(drafts, matched)
    fed.check_cache()


@pytest.mark.parametrize(("num_layers", "num_steps"), [(1, 1), (1, 2), (2, 3), (1, 4), (1, 5)])
def test_any_outcome_leaves_the_cache_and_the_chain_of_one_pass(num_layers, num_steps):
    network, leaves = DRAFTS[num_layers]
    check_rounds(Standalone(network, chain(num_steps), VOCAB), leaves)


@pytest.mark.parametrize("draft_vocab", [VOCAB - 20, VOCAB + 30])
def test_a_padded_draft_vocabulary_is_cut_or_filled_to_the_targets(draft_vocab):
    """Tokens that the draft does not know are never drafted, and those it is fed do no harm."""
    network, leaves = tiny_model(3, vocab_size=draft_vocab, num_hidden_layers=1)
    check_rounds(Standalone(network, chain(2), VOCAB), leaves)


def test_a_draft_model_is_needed():
    settings = DraftSettings(chain(3), noise=Noise.SHARED, ngram_min_match=1, ngram_max_match=3)
    with pytest.raises(ValueError, match="draft_model"):
        Standalone.create(settings, None, VOCAB)
    method = Standalone.create(settings, TARGET[0], VOCAB)
    assert (method.num_steps, method.num_draft_tokens, method.is_chain) == (3, 4, True)


def run_rounds(runner: Runner, temperature: float, num_rounds: int) -> tuple[int, int]:
    """Prefills `PROMPTS` in chunks and runs rounds; returns accepted and proposed drafts."""
    prefill_prompts(runner, PROMPTS, TABLE, CHUNK, temperature)
    accepted = proposed = 0
    for _ in range(num_rounds):
        verdict = runner.decode(np.arange(NUM_ROWS, dtype=np.int32), TABLE)
        accepted, proposed = accepted + int(verdict.accepted.sum()), proposed + int(verdict.proposed.sum())
    return accepted, proposed


def test_inside_the_compiled_round():
    """The draft is the target for the first test, and the target with noise for the second: one program."""
    network, leaves = TARGET
    method = Standalone(network, chain(3), VOCAB)

    def start(draft_leaves) -> Runner:
        return make_runner(
            TARGET,
            method,
            draft_leaves,
            num_rows=NUM_ROWS,
            page_size=PAGE_SIZE,
            num_pages=TABLE.size,
            max_model_len=MAX_LEN,
        )

    accepted, proposed = run_rounds(start(leaves), temperature=1.0, num_rounds=6)
    assert accepted == proposed == 6 * 3 * NUM_ROWS, "a sampled draft of an identical model is always right"

    rng = np.random.default_rng(0)
    noisy = tuple(leaf + 0.1 * leaf.std() * rng.standard_normal(leaf.shape).astype(np.float32) for leaf in leaves)
    runner = start(noisy)
    accepted, proposed = run_rounds(runner, temperature=0.7, num_rounds=6)
    assert 0 < accepted < proposed
    rows = jax.tree.map(np.asarray, runner.state.rows)
    texts = [rows.history[row, : rows.seq_len[row]].tolist() for row in range(NUM_ROWS)]
    check_cache(network, leaves, runner.state.caches[0], texts)
    with_bonus = [[*text, int(bonus)] for text, bonus in zip(texts, rows.bonus, strict=True)]
    check_cache(network, noisy, runner.state.draft.caches[0], with_bonus)
