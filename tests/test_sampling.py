"""The sampler against NumPy in float64: masks, noise, draws and log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from jaxspec.adjust import ban_stops
from jaxspec.checks import MAX_INT32
from jaxspec.context import Context
from jaxspec.sampling import best_token, draw, gumbel_noise, mask_logits, token_logprobs
from jaxspec.sampling_params import MAX_TEMPERATURE, MIN_TEMPERATURE
from jaxspec.state import Rows, Sampling

SMALL = 1e-5  # room for rounding in a sum of float32 probabilities

jit_mask, jit_ban = jax.jit(mask_logits), jax.jit(ban_stops)


@jax.jit
def jit_draw(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """A draw that asks for nothing of what was said before."""
    rows = Rows.zeros(logits.shape[0], 8, 1)
    paths = jnp.zeros((*positions.shape, 0), jnp.int32)
    return draw(logits, positions, sampling, Context.of(rows, lambda: paths))


def sampling_of(num_rows: int, *, num_stop_ids: int = 2, **fields) -> Sampling:
    """Settings of some rows; a number stands for all of them."""
    base = Sampling.zeros(num_rows, num_stop_ids)
    given = {}
    for name, value in fields.items():
        leaf = getattr(base, name)
        given[name] = jnp.broadcast_to(jnp.asarray(value, leaf.dtype), leaf.shape)
    return base._replace(**given)


def kept_tokens(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens stay, by sorting in float64: top-k, then top-p over what is left, then min-p; ties stay together."""
    logits = logits.astype(np.float64)
    kept = np.isfinite(logits)
    if top_k > 0:
        kept &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    probs = np.where(kept, np.exp(logits - logits.max()), 0.0)
    probs /= probs.sum()
    best = probs.max()
    if top_p < 1:
        order = np.argsort(-logits, kind="stable")
        reached = np.flatnonzero(np.cumsum(probs[order]) >= top_p)
        if len(reached):
            kept &= logits >= logits[order[reached[0]]]
    return kept & (probs >= min_p * best)


def check_mask(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """Compares with `kept_tokens`; where rounding decides whether the nucleus is reached, both answers are right."""
    logits = logits.astype(np.float32)
    settings = sampling_of(1, top_k=top_k, top_p=top_p, min_p=min_p)
    masked = np.asarray(jit_mask(jnp.asarray(logits)[None, None], settings))[0, 0]
    kept = np.isfinite(masked)
    np.testing.assert_array_equal(masked[kept], logits[kept])
    assert np.all(masked[~kept] == -np.inf)
    least = kept_tokens(logits, top_k, top_p * (1 - SMALL), min_p * (1 + SMALL))
    most = kept_tokens(logits, top_k, min(top_p * (1 + SMALL), 1.0), min_p * (1 - SMALL))
    assert np.all(least <= kept), "a token is missing"
    assert np.all(kept <= most), "a token is too much"


@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 63, 64, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.99])
def test_masks_equal_sorting_in_float64(top_k, top_p, min_p):
    rng = np.random.default_rng(top_k)
    for spread in (0.01, 1.0, 30.0):
        check_mask(rng.standard_normal(64) * spread, top_k, top_p, min_p)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.3, 0.7])
def test_ties_at_an_edge_stay_together(top_k, top_p):
    for logits in (
        [2, 1, 1, 1, 0, 0, 0, 0],
        [0] * 8,
        [1, 1, -5, -5, 1, 0, 0, 1],
        [0.0, -0.0, -1, 0.0, -0.0, -2, -3, 0.0],
    ):
        check_mask(np.array(logits, np.float32), top_k, top_p, 0.0)


@pytest.mark.parametrize("top_k", [0, 1, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_extreme_and_impossible_logits(top_k, top_p, min_p):
    lowest, highest = np.finfo(np.float32).min, np.finfo(np.float32).max
    for logits in (
        [-np.inf, 3, -np.inf, 2.5, -np.inf, 2, -np.inf, -np.inf],
        [-np.inf] * 7 + [0],
        [1e30, -1e30, 1e30, 0, lowest, lowest, 1, 2],
        [highest, 0, 0, 0, lowest, -np.inf, -1, 1],
        [-100000, -100001, -100001.5, -100003, -100000, -200000, -300000, -100002],
        [1e-30, -1e-30, 0, 2e-30, 1e-37, -1e-37, -0.0, 3e-38],
    ):
        check_mask(np.array(logits, np.float32), top_k, top_p, min_p)


def test_the_likeliest_token_always_stays():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 4, 50)) * 5, jnp.float32)
    masked = jit_mask(logits, sampling_of(3, top_k=1, top_p=1e-9, min_p=0.999))
    np.testing.assert_array_equal(np.isfinite(masked).sum(axis=-1), 1)
    np.testing.assert_array_equal(jnp.argmax(masked, axis=-1), jnp.argmax(logits, axis=-1))


@pytest.mark.parametrize("top_p", [1e-37, 1e-38, 1e-40, 1e-45, 1e-46, 0.0])
@pytest.mark.parametrize("min_p", [0.0, 1e-40, 1e-46, np.nextafter(1, 0)])
def test_a_top_p_or_min_p_at_the_end_of_float32_keeps_the_likeliest_token(top_p, min_p):
    logits = jnp.asarray([[[0.0, -3.0, 2.0, -np.inf]]], jnp.float32)
    masked = jit_mask(logits, sampling_of(1, top_p=top_p, min_p=min_p))
    np.testing.assert_array_equal(np.isfinite(masked)[0, 0], [False, False, True, False])
    alone = jit_mask(logits, sampling_of(1, min_p=min_p))
    assert np.isfinite(alone)[0, 0, 2]
    tokens = jit_draw(logits, jnp.array([[3]]), sampling_of(1, temperature=1.0, top_p=top_p, min_p=min_p))
    assert tokens[0, 0] == 2


@pytest.mark.parametrize("top_k", [20, 21, MAX_INT32])
def test_a_top_k_from_the_vocabularys_size_on_is_off(top_k):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 2, 20)), jnp.float32)
    np.testing.assert_array_equal(jit_mask(logits, sampling_of(1, top_k=top_k)), logits)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, MAX_TEMPERATURE])
def test_a_banned_stop_stays_impossible_at_either_end_of_the_temperature(temperature):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 200, 8)) * 1e4, jnp.float32)
    settings = sampling_of(1, temperature=temperature, stop_ids=[5, 0], min_len=999, seed=[1, 1])
    tokens = np.asarray(jit_draw(logits, jnp.arange(200)[None], settings))
    assert not set(tokens.ravel().tolist()) & {0, 5}


def test_masks_are_per_row():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 20)), jnp.float32)
    mixed = sampling_of(3, top_k=[0, 3, 0], top_p=[1, 1, 0.4], min_p=[0, 0.2, 0])
    masked = jit_mask(logits, mixed)
    np.testing.assert_array_equal(masked[0], logits[0])
    for row in (1, 2):
        alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], mixed)
        np.testing.assert_array_equal(masked[row], jit_mask(logits[row : row + 1], alone)[0])


def test_noise_depends_on_seed_and_position_alone():
    seeds = jnp.array([[0, 1], [0, 2], [7, 1]], jnp.uint32)
    positions = jnp.array([[5, 6], [5, 9], [0, 5]])
    noise = np.asarray(gumbel_noise(seeds, positions, 33))
    again = np.asarray(gumbel_noise(seeds[::-1], positions[::-1, 1:], 33))
    np.testing.assert_array_equal(again[:, 0], noise[::-1, 1])
    np.testing.assert_array_equal(gumbel_noise(seeds[:1], positions[1:2], 33)[0, 0], noise[0, 0])
    flat = noise.reshape(-1, 33)
    assert len(np.unique(flat, axis=0)) == len(flat), "another seed word or position is other noise"


def test_greedy_rows_take_the_first_of_the_likeliest_whatever_their_neighbours_do():
    logits = jnp.asarray(np.random.default_rng(1).integers(0, 4, (3, 5, 12)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(5), (3, 5))
    greedy = jit_draw(logits, positions, sampling_of(3))
    np.testing.assert_array_equal(greedy, np.argmax(logits, axis=-1))
    neighbours = sampling_of(3, temperature=[0, 5.0, 1.0], top_k=[3, 2, 0], top_p=[0.5, 0.9, 1], seed=[3, 4])
    np.testing.assert_array_equal(jit_draw(logits, positions, neighbours)[0], greedy[0])


def test_a_sampled_row_does_not_depend_on_its_neighbours():
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((3, 6, 40)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(6), (3, 6)) + 9
    rows = sampling_of(
        3, temperature=[0.8, 0, 1.5], top_p=[1, 1, 0.6], seed=[[1, 2], [3, 4], [5, 6]], min_len=[0, 20, 0]
    )
    together = jit_draw(logits, positions, rows)
    for row in range(3):
        alone = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], rows)
        np.testing.assert_array_equal(
            jit_draw(logits[row : row + 1], positions[row : row + 1], alone)[0], together[row]
        )


def test_a_node_draws_what_its_position_draws_in_any_block():
    """The same logits at the same position give the same token, alone or as a node: what acceptance rests on."""
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((1, 6, 40)), jnp.float32)
    settings = sampling_of(1, temperature=1.0, top_p=0.9, seed=[8, 9])
    block = jit_draw(logits, jnp.arange(6)[None], settings)
    for node in range(6):
        alone = jit_draw(logits[:, node : node + 1], jnp.array([[node]]), settings)
        assert alone[0, 0] == block[0, node]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 6, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 12, 0.95, 0.05)],
)
def test_draws_follow_the_law(temperature, top_k, top_p, min_p):
    num_draws, vocab = 20000, 16
    logits = np.random.default_rng(5).standard_normal(vocab).astype(np.float32)
    settings = sampling_of(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=[1, 2])
    tiled = jnp.broadcast_to(jnp.asarray(logits), (1, num_draws, vocab))
    tokens = np.asarray(jit_draw(tiled, jnp.arange(num_draws)[None], settings))[0]
    scaled = logits / temperature
    probs = np.where(kept_tokens(scaled, top_k, top_p, min_p), np.exp(scaled.astype(np.float64)), 0)
    probs /= probs.sum()
    assert tokens_fit(np.bincount(tokens, minlength=vocab), num_draws * probs)
    # One draw says nothing about the next.
    pairs = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab**2)
    assert tokens_fit(pairs, (num_draws - 1) * np.outer(probs, probs).ravel())


def tokens_fit(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square at 1 in 10 000, over outcomes expected 5 times or more; impossible ones must not occur."""
    assert not counts[expected == 0].any()
    often = expected >= 5
    statistic = float(np.sum((counts[often] - expected[often]) ** 2 / expected[often]))
    return float(chi2.sf(statistic, max(int(often.sum()) - 1, 1))) > 1e-4


def test_the_lowest_temperature_is_almost_greedy():
    logits = jnp.asarray(np.random.default_rng(6).standard_normal((1, 50, 100)) * 30, jnp.float32)
    tokens = jit_draw(logits, jnp.arange(50)[None], sampling_of(1, temperature=1e-5))
    np.testing.assert_array_equal(tokens, jnp.argmax(logits, axis=-1))


def test_stops_are_impossible_below_min_len_and_nowhere_else():
    logits = jnp.zeros((3, 2, 8))
    settings = sampling_of(3, num_stop_ids=3, stop_ids=[[2, -1, 7], [-1, -1, -1], [2, 5, -1]], min_len=[6, 99, 4])
    banned = np.isneginf(jit_ban(logits, jnp.array([[5, 6]] * 3), settings))
    expected = np.zeros((3, 2, 8), bool)
    expected[0, 0, [2, 7]] = True  # position 6 may stop; -1 is not the last token; row 2 is past its length
    np.testing.assert_array_equal(banned, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_stop_is_not_drawn_however_likely(temperature):
    logits = jnp.zeros((1, 4, 6)).at[:, :, 5].set(50.0)
    settings = sampling_of(1, temperature=temperature, stop_ids=[5, -1], min_len=12, seed=[1, 1])
    tokens = np.asarray(jit_draw(logits, jnp.array([[10, 11, 12, 13]]), settings))[0]
    assert not np.any(tokens[:2] == 5)
    np.testing.assert_array_equal(tokens[2:], 5)


def test_logprobs_are_of_the_models_own_law():
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((2, 3, 20)).astype(np.float32) * 4
    logits[0, 0, :4] = -np.inf
    tokens = rng.integers(4, 20, (2, 3)).astype(np.int32)
    chosen, ids, top = token_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 5, jnp.array(True))
    wide = logits.astype(np.float64)
    expected = wide - wide.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen, np.take_along_axis(expected, tokens[..., None], -1)[..., 0], atol=1e-5)
    order = np.argsort(-wide, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, -1), atol=1e-5)


@pytest.mark.parametrize(("num_top", "returned"), [(0, 0), (3, 3), (99, 6)])
def test_no_more_logprobs_than_tokens(num_top, returned):
    _, ids, top = token_logprobs(jnp.zeros((1, 2, 6)), jnp.zeros((1, 2), jnp.int32), num_top, jnp.array(True))
    assert ids.shape == top.shape == (1, 2, returned)
    np.testing.assert_array_equal(ids[0, 0], np.arange(returned))  # of equals, the lowest ids


def test_logprobs_that_nobody_wants_are_zeros():
    logits = jnp.asarray(np.random.default_rng(8).standard_normal((1, 2, 6)), jnp.float32)
    for leaf in token_logprobs(logits, jnp.ones((1, 2), jnp.int32), 3, jnp.array(False)):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("ties", [False, True])
def test_the_best_token_is_the_first_of_the_largest(ties):
    scores = np.random.default_rng(0).normal(size=(3, 2, 501)).astype(np.float32)
    if ties:
        scores = np.round(scores)
        scores[0, 0], scores[1, 0, :400] = -np.inf, -np.inf
    np.testing.assert_array_equal(best_token(jnp.asarray(scores)), np.argmax(scores, axis=-1))


def test_a_score_that_is_not_a_number_names_a_token_all_the_same():
    assert 0 <= int(best_token(jnp.array([0.0, jnp.nan, 1.0]))) < 3
