"""Acceptance against a model in plain Python that emits one token at a time."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.context import Context
from jaxspec.sampling import draw
from jaxspec.state import Rows
from jaxspec.tree import DraftTree, chain_parents
from jaxspec.verify import LENGTH, RUNNING, STOP, Verdict, Walk, accept, advance, clip_walk, follow_draws, longest_match

VOCAB = 4  # so small that drafts are often right


@functools.partial(jax.jit, static_argnames=("path_len",))
def jit_accept(tree: DraftTree, drawn: jax.Array, rows: Rows, path_len: int) -> Walk:
    return accept(tree, follow_draws(tree, drawn, path_len), rows)


jit_match = jax.jit(longest_match, static_argnames=("path_len",))


def random_tree(rng: np.random.Generator, num_rows: int, num_nodes: int, path_len: int) -> DraftTree:
    """Trees of at most `path_len` nodes a path; some nodes hold no draft (-1), some siblings are equal."""
    parents = np.full((num_rows, num_nodes), -1, np.int32)
    depth = np.zeros((num_rows, num_nodes), int)
    for row in range(num_rows):
        for node in range(1, num_nodes):
            parent = int(rng.choice(np.flatnonzero(depth[row, :node] < path_len - 1)))
            parents[row, node], depth[row, node] = parent, depth[row, parent] + 1
    tokens = rng.integers(-1, VOCAB, (num_rows, num_nodes)).astype(np.int32)
    return DraftTree(jnp.asarray(tokens), jnp.asarray(parents))


def random_rows(rng: np.random.Generator, num_rows: int) -> Rows:
    """Budgets from 0, stop ids with fillers, one row in five inactive."""
    rows = Rows.zeros(num_rows, 32, 2)
    sampling = rows.sampling._replace(stop_ids=jnp.asarray(rng.integers(-1, VOCAB, (num_rows, 2)), jnp.int32))
    return rows._replace(
        remaining=jnp.asarray(rng.integers(0, 7, num_rows), jnp.int32),
        active=jnp.asarray(rng.random(num_rows) < 0.8),
        sampling=sampling,
    )


class Expected(NamedTuple):
    """One row's outcome."""

    path: list[int]
    tokens: list[int]
    accepted: int
    proposed: int
    finish: int


def emit(tokens, parents, drawn, remaining, active, stop_ids) -> Expected:
    """Emits the target's token at the node reached, and goes on while a draft is that token."""
    if not active:
        return Expected([], [], 0, 0, RUNNING)
    node, path, emitted, accepted, finish = 0, [], [], 0, RUNNING
    while True:
        if len(emitted) >= remaining:
            finish = LENGTH
            break
        path.append(node)
        emitted.append(int(drawn[node]))
        right = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] == drawn[node]]
        accepted += bool(right)
        if drawn[node] in stop_ids:
            finish = STOP
            break
        if not right:
            finish = LENGTH if len(emitted) >= remaining else RUNNING
            break
        node = right[0]
    proposed = 0
    for draft in range(1, len(tokens)):
        depth, above = 0, draft
        while above > 0:
            depth, above = depth + 1, parents[above]
        proposed += tokens[draft] >= 0 and (finish == RUNNING or depth <= len(emitted))
    return Expected(path, emitted, accepted, proposed, finish)


def check_accept(tree: DraftTree, drawn: jax.Array, rows: Rows, path_len: int) -> None:
    """Compares `accept` with `emit`, row by row."""
    walk = jax.tree.map(np.asarray, jit_accept(tree, drawn, rows, path_len=path_len))
    arrays = tree.tokens, tree.parents, drawn, rows.remaining, rows.active, rows.sampling.stop_ids
    for row, one in enumerate(zip(*(np.asarray(x) for x in arrays), strict=True)):
        expected = emit(*one)
        count = walk.count[row]
        assert walk.tokens[row, :count].tolist() == expected.tokens
        assert walk.path[row, :count].tolist() == expected.path
        assert (walk.accepted[row], walk.proposed[row], walk.finish[row]) == expected[2:]


@pytest.mark.parametrize(("num_nodes", "path_len"), [(1, 1), (4, 4), (8, 3), (40, 6)])
def test_accept_emits_what_one_token_at_a_time_emits(num_nodes, path_len):
    rng = np.random.default_rng(num_nodes)
    for _ in range(4):
        tree, rows = random_tree(rng, 64, num_nodes, path_len), random_rows(rng, 64)
        check_accept(tree, jnp.asarray(rng.integers(0, VOCAB, (64, num_nodes)), jnp.int32), rows, path_len)


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_chains_that_are_mostly_right(num_steps):
    rng = np.random.default_rng(num_steps)
    drawn = rng.integers(0, VOCAB, (128, num_steps + 1)).astype(np.int32)
    tokens = np.where(rng.random(drawn.shape) < 0.8, np.roll(drawn, 1, axis=1), -1)
    tree = DraftTree(jnp.asarray(tokens), chain_parents(*tokens.shape))
    check_accept(tree, jnp.asarray(drawn), random_rows(rng, 128), num_steps + 1)


def test_the_longest_match_follows_the_drawn_branch():
    """Root 0 with children 1 (token 5) and 2 (token 6); 3 (token 7) below 2."""
    tree = DraftTree(jnp.array([[9, 5, 6, 7]]), jnp.array([[-1, 0, 0, 2]]))
    for drawn, path, matched in (
        ([6, 0, 7, 1], [0, 2, 3], 2),
        ([6, 7, 5, 1], [0, 2, 2], 1),
        ([5, 7, 7, 1], [0, 1, 1], 1),
        ([9, 7, 7, 1], [0, 0, 0], 0),  # the root's own token is no child
    ):
        nodes, count = jit_match(tree, jnp.array([drawn]), path_len=3)
        assert nodes[0].tolist() == path
        assert int(count[0]) == matched


def test_a_node_without_a_draft_matches_nothing_and_is_not_counted():
    tree = DraftTree(jnp.array([[3, -1, -1]]), chain_parents(1, 3))
    rows = Rows.zeros(1, 8, 1)._replace(remaining=jnp.array([5]), active=jnp.array([True]))
    walk = jit_accept(tree, jnp.array([[1, 2, 3]]), rows, 3)
    assert (int(walk.count[0]), int(walk.accepted[0]), int(walk.proposed[0])) == (1, 0, 0)


@pytest.mark.parametrize(
    ("remaining", "stop_ids", "count", "finish"),
    [
        (9, [-1, -1], 4, RUNNING),
        (4, [-1, -1], 4, LENGTH),
        (2, [-1, -1], 2, LENGTH),
        (9, [12, 10], 1, STOP),
        (3, [-1, 12], 3, STOP),  # a stop at the very end of the budget is a stop
        (2, [-1, 12], 2, LENGTH),  # one behind it is not reached
        (9, [-1, 14], 4, RUNNING),  # a token behind the match was never emitted
    ],
)
def test_emission_ends_at_the_first_stop_or_the_budget(remaining, stop_ids, count, finish):
    rows = Rows.zeros(1, 8, 2)
    rows = rows._replace(
        remaining=jnp.array([remaining]),
        active=jnp.array([True]),
        sampling=rows.sampling._replace(stop_ids=jnp.array([stop_ids])),
    )
    got = clip_walk(jnp.array([[10, 11, 12, 13, 14]]), jnp.array([3]), rows)
    assert (int(got[0][0]), int(got[1][0])) == (count, finish)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_row_stops_below_its_min_len(temperature):
    """Draws are banned from stopping there, so the walk needs no rule of its own."""
    rng = np.random.default_rng(0)
    num_rows, num_nodes = 64, 5
    rows = random_rows(rng, num_rows)
    sampling = rows.sampling._replace(
        stop_ids=jnp.broadcast_to(jnp.array([VOCAB - 1, -1]), (num_rows, 2)),
        min_len=jnp.asarray(rng.integers(8, 16, num_rows), jnp.int32),
        temperature=jnp.full(num_rows, temperature),
        seed=jnp.asarray(rng.integers(0, 99, (num_rows, 2)), jnp.uint32),
    )
    rows = rows._replace(seq_len=jnp.full(num_rows, 9), remaining=jnp.full(num_rows, 9), sampling=sampling)
    logits = jnp.asarray(rng.standard_normal((num_rows, num_nodes, VOCAB)), jnp.float32).at[:, :, -1].add(2)
    paths = jnp.full((num_rows, num_nodes, num_nodes - 1), -1, jnp.int32)
    positions = 10 + jnp.broadcast_to(jnp.arange(num_nodes), (num_rows, num_nodes))
    drawn = jax.jit(lambda x: draw(x, positions, sampling, Context.of(rows, lambda: paths)))(logits)
    tokens = jnp.roll(drawn, 1, axis=1)  # every draft is right
    check_accept(DraftTree(tokens, chain_parents(num_rows, num_nodes)), drawn, rows, num_nodes)
    walk = jit_accept(DraftTree(tokens, chain_parents(num_rows, num_nodes)), drawn, rows, path_len=num_nodes)
    stopped = np.asarray(walk.finish) == STOP
    assert stopped.any()
    assert np.all((9 + np.asarray(walk.count) >= np.asarray(sampling.min_len))[stopped])


def test_rows_advance_by_what_was_emitted():
    rng = np.random.default_rng(1)
    tree, rows = random_tree(rng, 32, 6, 4), random_rows(rng, 32)
    history = jnp.asarray(rng.integers(0, VOCAB, rows.history.shape), jnp.int32)
    rows = rows._replace(
        seq_len=jnp.asarray(rng.integers(1, 20, 32), jnp.int32), history=history, bonus=jnp.full(32, 77)
    )
    walk = jit_accept(tree, jnp.asarray(rng.integers(0, VOCAB, (32, 6)), jnp.int32), rows, path_len=4)
    after = advance(rows, walk)
    for row in range(32):
        count, seq_len = int(walk.count[row]), int(rows.seq_len[row])
        emitted = walk.tokens[row, :count].tolist()
        expected = history[row].tolist()
        expected[seq_len + 1 : seq_len + 1 + count] = emitted
        assert after.history[row].tolist() == expected
        assert int(after.seq_len[row]) == seq_len + count
        assert int(after.remaining[row]) == int(rows.remaining[row]) - count
        assert int(after.bonus[row]) == (emitted[-1] if emitted else 77)
        assert bool(after.active[row]) == (bool(rows.active[row]) and int(walk.finish[row]) == RUNNING)


def test_verdicts_of_steps_that_did_not_run_count_nothing():
    verdict = Verdict.zeros(3, 2, path_len=4, num_top=5)
    assert verdict.tokens.shape == (3, 2, 4)
    assert verdict.top_logprobs.shape == (3, 2, 4, 5)
    assert verdict.logprobs.dtype == jnp.float32
    for name in ("count", "accepted", "proposed", "finish"):
        np.testing.assert_array_equal(getattr(verdict, name), np.zeros((3, 2), np.int32))
