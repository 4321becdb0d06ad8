"""NGRAM: prompt lookup on the device. The last tokens are looked up in the request's own prompt and output.

The row proposes what followed the longest earlier occurrence of its last `max_match` .. `min_match` tokens, the most
recent one where several are equally long. Where the copy runs past the end of the text it goes on with itself: a text
that repeats with some period is drafted for as many steps as wanted.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.draft.base import CacheShape, DraftSettings, Observation, chain_tree
from jaxspec.models.network import Network
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Ngram:
    """Prompt lookup; keeps no state beyond the rows' history."""

    num_steps: int
    min_match: int
    max_match: int
    is_chain: bool = True
    capture: tuple[int | str, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Ngram":
        return cls(settings.num_steps, settings.ngram_min_match, settings.ngram_max_match)

    @property
    def num_draft_tokens(self) -> int:
        return self.num_steps + 1

    def init(self, shape: CacheShape) -> DraftState:
        return DraftState((), ())

    def propose(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        return chain_tree(rows, lookup(rows.history, rows.seq_len, self.num_steps, self.min_match, self.max_match))

    def observe(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        return state


def lookup(history: jax.Array, last: jax.Array, num_steps: int, min_match: int, max_match: int) -> jax.Array:
    """Continuation of the longest earlier occurrence of each row's last tokens.

    Args:
        history: int32 [B, S].
        last: int32 [B], index of the newest token.
        num_steps: tokens to draft.
        min_match, max_match: shortest and longest suffix looked up.

    Returns:
        int32 [B, num_steps]; all -1 where nothing matches.
    """
    places = jnp.arange(history.shape[1])
    length = jnp.zeros(history.shape, jnp.int32)
    matching = places < last[:, None]  # the suffix itself is not an occurrence
    for back in range(max_match):
        wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0)[:, None], axis=1)
        # roll wraps at the front: places before `back` have no such token.
        matching &= (jnp.roll(history, back, axis=1) == wanted) & (places >= back)
        length += matching
    best_length = jnp.max(length, axis=1)
    # The last place with the best length: argmax of the reversed row finds the most recent.
    best = history.shape[1] - 1 - jnp.argmax(length[:, ::-1] == best_length[:, None], axis=1)
    period = jnp.maximum(last - best, 1)
    source = best[:, None] + 1 + jnp.arange(num_steps) % period[:, None]
    drafts = jnp.take_along_axis(history, jnp.minimum(source, history.shape[1] - 1), axis=1)
    return jnp.where((best_length >= min_match)[:, None], drafts, -1).astype(jnp.int32)
