"""NGRAM: prompt lookup on the device. The last tokens are looked up in the request's own prompt and output.

The row proposes what followed the longest earlier occurrence of its last `max_match` .. `min_match` tokens, the most
recent one where several are equally long; as a tree, what followed the best `topk` occurrences that differ in it.
Where the copy runs past the end of the text it goes on with itself: a text that repeats with some period is drafted
for as many steps as wanted.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.draft.base import CacheShape, DraftSettings, Observation, chain_tree
from jaxspec.draft.grow import Candidates
from jaxspec.draft.shape import Shaped, TreeShape
from jaxspec.draft.unite import unite
from jaxspec.models.network import Network
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree

# Probability that one more token of a copy of up to 3 is right, by the length of the match it follows: measured on
# SmolLM2-135M-Instruct's greedy answers to 477 questions of GSM8K's training set (91 thousand tokens).
# They rank drafts where a tree has no room for all of them, and change no output.
TOKEN_ACCEPTANCE = (0.43, 0.62, 0.76)


@dataclasses.dataclass(frozen=True)
class Ngram(Shaped):
    """Prompt lookup; keeps no state beyond the rows' history."""

    shape: TreeShape
    min_match: int
    max_match: int
    capture: tuple[int | str, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Ngram":
        return cls(settings.shape, settings.ngram_min_match, settings.ngram_max_match)

    def init(self, shape: CacheShape) -> DraftState:
        return DraftState((), ())

    def propose(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        shape = self.shape
        found = lookup(rows.history, rows.seq_len, shape, self.min_match, self.max_match)
        steps = jnp.arange(shape.num_steps, dtype=jnp.int32)
        by_length = jnp.log(jnp.array(TOKEN_ACCEPTANCE, jnp.float32))
        one_more = by_length[jnp.clip(found.lengths, 1, by_length.size) - 1]
        scores = one_more[:, :, None] * (steps + 1)
        if shape.is_chain:
            return chain_tree(rows, found.drafts[:, 0], scores[:, 0] if shape.is_scored else None)
        flat = (rows.bonus.shape[0], shape.topk * shape.num_steps)
        order = jnp.arange(flat[1], dtype=jnp.int32)
        parents = jnp.broadcast_to(jnp.where(order % shape.num_steps == 0, -1, order - 1), flat)
        candidates = Candidates(found.drafts.reshape(flat), scores.reshape(flat), parents)
        return unite(rows.bonus, candidates, depth=shape.num_steps, num_nodes=shape.num_nodes)

    def observe(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        return state


class Matches(NamedTuple):
    """Earlier occurrences of each row's last tokens, the best first: the longest, then the most recent."""

    drafts: jax.Array  # int32 [B, topk, num_steps], what followed; -1 where there are fewer matches
    lengths: jax.Array  # int32 [B, topk], tokens that match


def lookup(history: jax.Array, last: jax.Array, shape: TreeShape, min_match: int, max_match: int) -> Matches:
    """Looks up each row's last tokens.

    Args:
        history: int32 [B, S].
        last: int32 [B], index of the newest token.
        shape: how many matches, and how many tokens of each.
        min_match, max_match: shortest and longest suffix looked up.
    """
    size = history.shape[1]
    places = jnp.arange(size, dtype=jnp.int32)
    lengths = jnp.zeros(history.shape, jnp.int32)
    matching = places < last[:, None]  # the suffix itself is not an occurrence
    for back in range(max_match):
        wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        # roll wraps at the front: places before `back` have no such token.
        matching &= (jnp.roll(history, back, axis=1) == wanted) & (places >= back)
        lengths += matching
    steps = jnp.arange(shape.num_steps, dtype=jnp.int32)
    lengths = jnp.where(lengths >= min_match, lengths, 0)
    drafts, found = [], []
    for _ in range(shape.topk):
        length = jnp.max(lengths, axis=1)
        # The last place with the best length: argmax of the reversed row finds the most recent.
        best = size - 1 - jnp.argmax(lengths[:, ::-1] == length[:, None], axis=1).astype(jnp.int32)
        period = jnp.maximum(last - best, 1)
        source = best[:, None] + 1 + steps % period[:, None]
        copied = jnp.take_along_axis(history, jnp.minimum(source, size - 1), axis=1)
        drafts.append(jnp.where((length > 0)[:, None], copied, -1))
        found.append(length)
        if len(found) < shape.topk:
            taken = (places == best[:, None]) | _goes_on_alike(history, last, copied)
            lengths = jnp.where(taken, 0, lengths)
    return Matches(jnp.stack(drafts, axis=1).astype(jnp.int32), jnp.stack(found, axis=1))


def _goes_on_alike(history: jax.Array, last: jax.Array, copied: jax.Array) -> jax.Array:
    """Marks the places [B, S] that are followed by just the tokens copied [B, num_steps]."""
    places = jnp.arange(history.shape[1], dtype=jnp.int32)
    alike = jnp.ones(history.shape, bool)
    for step in range(copied.shape[1]):
        known = places + 1 + step <= last[:, None]
        alike &= known & (jnp.roll(history, -(1 + step), axis=1) == copied[:, step, None])
    return alike
