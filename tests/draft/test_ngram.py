"""Prompt lookup against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.base import CacheShape, DraftSettings, Noise
from jaxspec.draft.ngram import TOKEN_ACCEPTANCE, Ngram, lookup
from jaxspec.draft.shape import TreeShape
from jaxspec.state import DraftState, Rows
from tests.tiny import chain

jit_lookup = jax.jit(lookup, static_argnames=("shape", "min_match", "max_match"))


def search_all(text: list[int], num_steps: int, min_match: int, max_match: int) -> list[tuple[list[int], int, bool]]:
    """What follows the earlier occurrences of the end of `text`, longest first, then the latest; how many tokens
    match; and whether all that follows is text, none of it a copy of the copy."""
    found, seen = [], set()
    for length in range(min(max_match, len(text) - 1), min_match - 1, -1):
        suffix = text[-length:]
        for end in range(len(text) - 1, length - 1, -1):  # text[:end] ends with the occurrence
            if text[end - length : end] == suffix and end not in seen:
                seen.add(end)
                grown = list(text)
                for step in range(num_steps):
                    grown.append(grown[end + step])  # reads its own copy where it passes the end
                found.append((grown[len(text) :], length, end + num_steps <= len(text)))
    return found


def search(text: list[int], num_steps: int, min_match: int, max_match: int) -> list[int]:
    """Copies what follows the latest of the longest earlier occurrences of the end of `text`."""
    found = search_all(text, num_steps, min_match, max_match)
    return found[0][0] if found else [-1] * num_steps


def matches(texts: list[list[int]], shape: TreeShape, min_match: int, max_match: int, size: int):
    """`lookup` over texts; what is behind the end of a text would match, were it read."""
    history = np.zeros((len(texts), size), np.int32)
    for row, text in enumerate(texts):
        history[row] = np.resize(text, size)
    last = jnp.array([len(text) - 1 for text in texts], jnp.int32)
    found = jit_lookup(jnp.asarray(history), last, shape=shape, min_match=min_match, max_match=max_match)
    assert found.drafts.dtype == jnp.int32
    return found


def look(texts: list[list[int]], num_steps: int, min_match: int, max_match: int, size: int) -> list[list[int]]:
    """The best match of each text."""
    return matches(texts, chain(num_steps), min_match, max_match, size).drafts[:, 0].tolist()


@pytest.mark.parametrize("alphabet", [1, 2, 3, 12])
@pytest.mark.parametrize(("num_steps", "min_match", "max_match"), [(3, 1, 3), (5, 2, 4), (1, 1, 1), (8, 3, 3)])
def test_lookup_equals_a_search(alphabet, num_steps, min_match, max_match):
    rng = np.random.default_rng(alphabet)
    texts = [rng.integers(0, alphabet, rng.integers(1, 25)).tolist() for _ in range(200)]
    texts += [rng.integers(0, alphabet, 24).tolist() for _ in range(20)]  # full to the end
    expected = [search(text, num_steps, min_match, max_match) for text in texts]
    assert look(texts, num_steps, min_match, max_match, size=24) == expected


def test_the_longest_match_wins_over_a_later_shorter_one():
    #       1 2 3 -> 7              3 -> 9
    assert look([[1, 2, 3, 7, 0, 3, 9, 1, 2, 3]], 2, 1, 3, size=16) == [[7, 0]]


def test_of_equal_matches_the_most_recent_wins():
    assert look([[5, 1, 5, 2, 5, 3, 5]], 1, 1, 3, size=16) == [[3]]


def test_a_match_longer_than_max_match_counts_as_max_match():
    """Both places match in their last two tokens; only the first would match in three."""
    assert look([[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]], 1, 1, 2, size=16) == [[8]]


def test_a_period_is_continued_past_the_end():
    assert look([[9, 1, 2, 3, 1, 2, 3, 1]], 7, 1, 3, size=16) == [[2, 3, 1, 2, 3, 1, 2]]
    assert look([[4, 4]], 4, 1, 3, size=16) == [[4, 4, 4, 4]]


@pytest.mark.parametrize("text", [[3], [1, 2, 3, 4, 5]])
def test_nothing_found_is_no_draft(text):
    assert look([text], 3, 1, 3, size=8) == [[-1, -1, -1]]


def test_a_match_below_min_match_is_no_draft():
    text = [1, 2, 9, 0, 2]
    assert look([text], 2, 1, 3, size=8) == [[9, 0]]
    assert look([text], 2, 2, 3, size=8) == [[-1, -1]]


@pytest.mark.parametrize("alphabet", [2, 3, 12])
def test_several_matches_are_the_best_that_go_on_differently(alphabet):
    rng = np.random.default_rng(alphabet)
    texts = [rng.integers(0, alphabet, rng.integers(1, 25)).tolist() for _ in range(200)]
    found = matches(texts, TreeShape(3, 4, 8), 1, 3, size=24)
    for text, drafts, lengths in zip(texts, found.drafts.tolist(), found.lengths.tolist(), strict=True):
        expected: list[tuple[list[int], int]] = []
        gone: list[list[int]] = []  # what was taken; text that goes on alike is passed over, a copy of a copy is not
        for draft, length, is_text in search_all(text, 3, 1, 3):
            if len(expected) < 4 and not (is_text and draft in gone):
                expected.append((draft, length))
                gone.append(draft)
        expected += [([-1] * 3, 0)] * (4 - len(expected))
        assert list(zip(drafts, lengths, strict=True)) == expected


def test_a_tree_holds_what_follows_several_matches_and_shares_their_beginning():
    #        1 2 -> 3 4 5           1 2 -> 3 6 7           1 2 -> 8 9 5
    text = [0, 1, 2, 8, 9, 5, 0, 0, 1, 2, 3, 6, 7, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    rows = Rows.zeros(1, 32, 1)._replace(
        history=jnp.array([text + [0] * 9]), seq_len=jnp.array([len(text) - 1]), bonus=jnp.array([2])
    )
    tree = Ngram(TreeShape(3, 3, 9), 1, 2).propose((), DraftState((), ()), rows, jnp.zeros((1, 1), jnp.int32))
    assert tree.tokens.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9, 5]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 1, 4, 0, 6, 7]]
    assert tree.scores is not None
    per_token = np.log(TOKEN_ACCEPTANCE[1])
    np.testing.assert_allclose(tree.scores, per_token * np.array([[0, 1, 2, 3, 2, 3, 1, 2, 3]]), rtol=1e-6)
    small = Ngram(TreeShape(3, 3, 6), 1, 2).propose((), DraftState((), ()), rows, jnp.zeros((1, 1), jnp.int32))
    assert small.tokens.tolist() == [[2, 3, 4, 6, 8, 9]]  # the likeliest: all of depth 1, then of depth 2
    assert small.parents.tolist() == [[-1, 0, 1, 1, 0, 4]]


def test_the_method_drafts_a_chain_behind_the_bonus_and_keeps_no_state():
    settings = DraftSettings(TreeShape(3, 1, 4), noise=Noise.SHARED, ngram_min_match=1, ngram_max_match=2)
    method = Ngram.create(settings, None, target_vocab=10)
    assert (method.num_steps, method.num_draft_tokens, method.capture) == (3, 4, ())
    state = method.init(CacheShape(1, 1, 16, jnp.dtype("float32")))
    assert not jax.tree.leaves(state)
    rows = Rows.zeros(1, 8, 1)._replace(
        history=jnp.array([[1, 2, 3, 1, 0, 0, 0, 0]]), seq_len=jnp.array([3]), bonus=jnp.array([1])
    )
    tree = method.propose((), state, rows, jnp.zeros((1, 1), jnp.int32))
    assert tree.tokens.tolist() == [[1, 2, 3, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]
