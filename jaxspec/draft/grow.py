"""Growing a draft tree level by level, as EAGLE-2 does (arXiv 2406.16858 §4); a chain is the tree of one branch.

Each level runs `width` nodes of the level above as one tree-masked batch and scores `topk` children of each. All of
them are candidates; the best by cumulative log-probability become the next level, and in the end the best
`num_draft_tokens - 1` of all candidates become the tree. A child never scores above its parent and has a higher
index, so with ties broken by index a chosen node's parent is chosen too and stands before it.

In a static tree (EAGLE-1, arXiv 2401.15077 §4.2) the same candidates are made, and which of them become the next level
and the tree is known beforehand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.draft.shape import TreeShape
from jaxspec.sampling import best_token
from jaxspec.tree import DraftTree, pack_bits


class Children(NamedTuple):
    """The best continuations of each node; their scores are log-probabilities, and 0 where there is no choice."""

    tokens: jax.Array  # int32 [..., topk]
    scores: jax.Array  # float32 [..., topk], at most 0
    laws: jax.Array | None = None  # float32 [..., V], what a single child was drawn from, where a rule asks for it


class Frontier(NamedTuple):
    """Nodes to be run: K = `width` per row."""

    tokens: jax.Array  # int32 [B, K]
    depth: jax.Array  # int32 scalar; 0 is the first draft
    paths: jax.Array  # int32 [B, K, num_steps - 1], drafts down to the node itself, -1 behind it
    ancestors: jax.Array  # uint32 [B, K, words], over the earlier levels' slots and this level's own
    earlier: Any  # pending of the earlier levels, see `Decoder.extend`
    carry: Any  # leaves [B, K, ...]: what each node's parent handed down


class Level(NamedTuple):
    """What running a frontier gives."""

    children: Children  # [B, K, topk]
    pending: Any  # this level's, leaves [L, B, K, ...]
    carry: Any  # leaves [B, K, ...], handed down to each node's children


def best_children(scores: jax.Array, shape: TreeShape) -> Children:
    """The best `shape.topk` of scores float32 [..., V] (from `sampling.perturb`)."""
    topk = shape.topk
    if not shape.is_scored:
        tokens = best_token(scores)[..., None]
        return Children(tokens, jnp.zeros(tokens.shape, jnp.float32))
    best, tokens = jax.lax.top_k(scores, topk)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Rounding may put a certain token above 0, and then a child above its parent.
    return Children(tokens.astype(jnp.int32), jnp.minimum(best - total, 0.0))


class _Beam(NamedTuple):
    tokens: jax.Array  # int32 [B, K]
    scores: jax.Array  # float32 [B, K], cumulative
    candidates: jax.Array  # int32 [B, K], the nodes' indices among all candidates
    paths: jax.Array  # int32 [B, K, num_steps - 1], drafts above the nodes, -1 from their own places on
    slots: jax.Array  # bool [B, K, (num_steps - 1) K], ancestors among the slots of earlier levels
    earlier: Any
    carry: Any


class Candidates(NamedTuple):
    """Nodes that may become the tree, below a root that is none of them."""

    tokens: jax.Array  # int32 [B, C]
    scores: jax.Array  # float32 [B, C], cumulative; no node's is above its parent's
    parents: jax.Array  # int32 [B, C], candidate index below the node's own; -1 is the root


def grow(
    bonus: jax.Array,
    first: Children,
    carry: Any,
    earlier: Any,
    shape: TreeShape,
    run: Callable[[Frontier], Level],
) -> DraftTree:
    """Grows a tree below each row's bonus token.

    Args:
        bonus: int32 [B].
        first: children of the bonus token, [B, topk].
        carry: leaves [B, ...], what the bonus token hands down to them.
        earlier: room for the pending of (num_steps - 1) * width nodes.
        shape: sizes.
        run: runs one level; it is traced once.
    """
    num_rows, topk, width = first.tokens.shape[0], shape.topk, shape.width
    num_slots = (shape.num_steps - 1) * width
    own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (num_rows, width, width))
    rows = jnp.arange(num_rows)[:, None]
    fixed = None if shape.static is None else shape.static.tables

    def pick(scores: jax.Array, places: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Scores and indices of the `width` candidates that are run next: the best, or those in `places`."""
        if places is None:
            return jax.lax.top_k(scores, width)
        places = jnp.broadcast_to(places, (num_rows, width))
        return jnp.take_along_axis(scores, places, axis=1), places

    def level(beam: _Beam, step: tuple[jax.Array, jax.Array | None]) -> tuple[_Beam, tuple[Candidates, Any]]:
        depth, places = step
        ancestors = pack_bits(jnp.concatenate([beam.slots, own], axis=-1))
        paths = beam.paths.at[:, :, depth].set(beam.tokens)
        out = run(Frontier(beam.tokens, depth, paths, ancestors, beam.earlier, beam.carry))
        scores = (beam.scores[..., None] + out.children.scores).reshape(num_rows, -1)
        tokens = out.children.tokens.reshape(num_rows, -1)
        found = Candidates(tokens, scores, jnp.repeat(beam.candidates, topk, axis=1))
        kept_scores, kept = pick(scores, places)
        parent = kept // topk
        slots = beam.slots[rows, parent] | (depth * width + parent[..., None] == jnp.arange(num_slots))
        write = lambda room, new: jax.lax.dynamic_update_slice_in_dim(room, new, depth * width, axis=2)  # noqa: E731
        beam = _Beam(
            tokens=jnp.take_along_axis(tokens, kept, axis=1),
            scores=kept_scores,
            candidates=topk + depth * width * topk + kept,
            paths=paths[rows, parent],
            slots=slots,
            earlier=jax.tree.map(write, beam.earlier, out.pending),
            carry=jax.tree.map(lambda leaf: leaf[rows, parent], out.carry),
        )
        return beam, (found, out.children.laws)

    root = Candidates(first.tokens, first.scores, jnp.full((num_rows, topk), -1, jnp.int32))
    chosen = None if fixed is None else jnp.asarray(fixed.chosen)
    finish = functools.partial(choose, bonus, num_nodes=shape.num_nodes, chosen=chosen, is_scored=shape.is_scored)
    laws = None if first.laws is None else first.laws[:, None]
    if num_slots == 0:
        return finish(root)._replace(laws=laws)
    start_scores, places = pick(first.scores, None if fixed is None else jnp.asarray(fixed.run[0]))
    start = _Beam(
        tokens=jnp.take_along_axis(first.tokens, places, axis=1),
        scores=start_scores,
        candidates=places.astype(jnp.int32),
        paths=jnp.full((num_rows, width, shape.num_steps - 1), -1, jnp.int32),
        slots=jnp.zeros((num_rows, width, num_slots), bool),
        earlier=earlier,
        carry=jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], width, axis=1), carry),
    )
    depths = jnp.arange(shape.num_steps - 1, dtype=jnp.int32)
    _, (levels, more_laws) = jax.lax.scan(level, start, (depths, None if fixed is None else jnp.asarray(fixed.run[1:])))
    flat = lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(num_rows, -1)  # noqa: E731
    together = lambda above, below: jnp.concatenate([above, flat(below)], axis=1)  # noqa: E731
    if laws is not None:
        laws = jnp.concatenate([laws, jnp.moveaxis(more_laws[:, :, 0], 0, 1)], axis=1)
    return finish(jax.tree.map(together, root, levels))._replace(laws=laws)


def choose(
    bonus: jax.Array,
    candidates: Candidates,
    *,
    num_nodes: int,
    chosen: jax.Array | None = None,
    is_scored: bool = True,
) -> DraftTree:
    """The tree of the best `num_nodes - 1` candidates below each row's bonus token, or of those `chosen` beforehand."""
    if chosen is None:
        _, chosen = jax.lax.top_k(candidates.scores, num_nodes - 1)
        chosen = jnp.sort(chosen, axis=1)
    else:
        chosen = jnp.broadcast_to(chosen, (bonus.shape[0], num_nodes - 1))
    tokens, scores, parents = (jnp.take_along_axis(leaf, chosen, axis=1) for leaf in candidates)
    # What a mask made impossible is no draft.
    tokens = jnp.where(scores == -jnp.inf, -1, tokens)
    # A parent's place is the number of chosen candidates before it; the root is node 0.
    places = 1 + jnp.sum(chosen[:, None, :] < parents[:, :, None], axis=-1, dtype=jnp.int32)
    parents = jnp.where(parents < 0, 0, places)
    top = bonus[:, None]
    return DraftTree(
        jnp.concatenate([top, tokens], axis=1),
        jnp.concatenate([jnp.full_like(top, -1), parents], axis=1).astype(jnp.int32),
        jnp.concatenate([jnp.zeros(top.shape, jnp.float32), scores], axis=1) if is_scored else None,
    )
