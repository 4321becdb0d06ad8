"""What a round emits: a judged path, up to the first token that ends its row.

The walk ends at the first token that stops the row and at the row's budget, on the device, so that a finished row
emits and commits nothing in a round that is already in flight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.kv_cache import Accepted
from jaxspec.state import Rows
from jaxspec.tree import DraftTree, node_depths

RUNNING, STOP, LENGTH = 0, 1, 2


class Verdict(NamedTuple):
    """What a step tells the host. P = num_steps + 1 (1 for a prefill)."""

    tokens: jax.Array  # int32 [B, P], emitted tokens; beyond `count` they mean nothing
    count: jax.Array  # int32 [B], emitted tokens; 0 for rows that did not run
    accepted: jax.Array  # int32 [B], emitted tokens that were drafts
    proposed: jax.Array  # int32 [B], drafts that were judged (not those behind the end of a finished row)
    finish: jax.Array  # int32 [B], RUNNING, STOP or LENGTH
    logprobs: jax.Array  # float32 [B, P]
    top_ids: jax.Array  # int32 [B, P, num_top]
    top_logprobs: jax.Array  # float32 [B, P, num_top]

    @classmethod
    def zeros(cls, *lead: int, path_len: int, num_top: int) -> "Verdict":
        """Verdicts of steps that did not run; `lead` is (B,) or (rounds, B)."""
        one, path, top = lead, (*lead, path_len), (*lead, path_len, num_top)
        shapes = {"tokens": path, "top_ids": top}
        floats = {"logprobs": path, "top_logprobs": top}
        return cls(
            **{name: jnp.zeros(shapes.get(name, one), jnp.int32) for name in cls._fields if name not in floats},
            **{name: jnp.zeros(shape, jnp.float32) for name, shape in floats.items()},
        )


class Judgement(NamedTuple):
    """The path that a rule follows through a tree, before stops and budgets end it."""

    path: jax.Array  # int32 [B, P], nodes from the root on; the last accepted one repeats
    tokens: jax.Array  # int32 [B, P], what follows each node of the path; beyond `matched` + 1 they mean nothing
    matched: jax.Array  # int32 [B], accepted drafts; one more token follows them
    drawn: jax.Array  # int32 [B, N], the target's token at every node; -1 where the rule draws none


class Walk(NamedTuple):
    """The accepted path, before logprobs are known."""

    path: jax.Array  # int32 [B, P], nodes from the root on; beyond `count` they mean nothing
    tokens: jax.Array  # int32 [B, P], what follows each node of the path
    count: jax.Array  # int32 [B]
    accepted: jax.Array  # int32 [B]
    proposed: jax.Array  # int32 [B]
    finish: jax.Array  # int32 [B]

    def as_accepted(self) -> Accepted:
        """The nodes whose keys and values are kept: each emitted token's parent."""
        return Accepted(self.path, self.count)


def longest_match(tree: DraftTree, drawn: jax.Array, path_len: int) -> tuple[jax.Array, jax.Array]:
    """Follows the children that equal the target's draws.

    Args:
        tree: tokens and parents [B, N].
        drawn: int32 [B, N], the target's token at every node.
        path_len: P, nodes of the longest path.

    Returns:
        path int32 [B, P] (the last node repeats) and the number of accepted drafts int32 [B].
    """
    node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    going = jnp.ones_like(node, dtype=bool)
    path = [node]
    for _ in range(path_len - 1):
        wanted = jnp.take_along_axis(drawn, node[:, None], axis=1)
        child = (tree.parents == node[:, None]) & (tree.tokens == wanted)
        going &= jnp.any(child, axis=1)
        node = jnp.where(going, jnp.argmax(child, axis=1).astype(jnp.int32), node)
        path.append(node)
    nodes = jnp.stack(path, axis=1)
    # A child's index is above its parent's, so the path grew exactly where the node changed.
    return nodes, jnp.sum(nodes[:, 1:] != nodes[:, :-1], axis=1, dtype=jnp.int32)


def follow_draws(tree: DraftTree, drawn: jax.Array, path_len: int) -> Judgement:
    """The path of the drafts that are the target's draws int32 [B, N]."""
    path, matched = longest_match(tree, drawn, path_len)
    return Judgement(path, jnp.take_along_axis(drawn, path, axis=1), matched, drawn)


def clip_walk(tokens: jax.Array, num_matched: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Ends emission at the first stop token and at the budget.

    Args:
        tokens: int32 [B, P], candidates in order of emission.
        num_matched: int32 [B], accepted drafts; one more token follows them.
        rows: stop ids and budgets. (A stop below `min_len` cannot have been drawn.)

    Returns:
        count int32 [B] (0 for inactive rows) and finish int32 [B].
    """
    order = jnp.arange(tokens.shape[1])
    is_stop = jnp.any(tokens[:, :, None] == rows.sampling.stop_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(is_stop, order, tokens.shape[1]), axis=1)
    reach = jnp.minimum(num_matched + 1, rows.remaining)
    stopped = first_stop < reach
    count = jnp.where(stopped, first_stop + 1, reach)
    finish = jnp.where(stopped, STOP, jnp.where(count >= rows.remaining, LENGTH, RUNNING))
    count = jnp.where(rows.active, count, 0)
    return count.astype(jnp.int32), jnp.where(rows.active, finish, RUNNING).astype(jnp.int32)


def accept(tree: DraftTree, judgement: Judgement, rows: Rows) -> Walk:
    """Ends a judged path where the row stops, and counts what was judged up to there."""
    path, tokens, matched, _ = judgement
    count, finish = clip_walk(tokens, matched, rows)
    depth = node_depths(tree.parents, path.shape[1] - 1)
    judged = (depth > 0) & (tree.tokens >= 0) & ((finish == RUNNING)[:, None] | (depth <= count[:, None]))
    proposed = jnp.where(rows.active, jnp.sum(judged, axis=1, dtype=jnp.int32), 0)
    return Walk(path, tokens, count, jnp.minimum(matched, count), proposed, finish)


def advance(rows: Rows, walk: Walk) -> Rows:
    """Rows after their tokens were emitted."""
    rows = rows.write_history(walk.tokens, rows.seq_len + 1, walk.count)
    last = jnp.take_along_axis(walk.tokens, jnp.maximum(walk.count - 1, 0)[:, None], axis=1)[:, 0]
    return rows._replace(
        bonus=jnp.where(walk.count > 0, last, rows.bonus),
        seq_len=rows.seq_len + walk.count,
        remaining=rows.remaining - walk.count,
        active=rows.active & (walk.finish == RUNNING),
    )
