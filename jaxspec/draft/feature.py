"""EAGLE and EAGLE3: a head drafts from the target's own hidden states.

The index contract, written once: prompt and output are t_0, t_1, ...; the target's feature h_i is made from t_0 .. t_i.
A head reads pairs (h_i, t_{i+1}) at rotary position i and predicts t_{i+2}.

    committed        t_0 .. t_{n-1}        bonus t_n at position n, not in the target's cache
    head's cache     pairs 0 .. n-1        the last one holds the bonus; all with the target's features
    first drafts     from pair n-1         children at position n+1
    level d          pair n+d              token at n+1+d, with the parent's own state for a feature

`observe` runs the pairs of committed tokens with true features, which replaces what drafting only approximated, and
yields the next round's first proposals: `num_steps` = S costs one extend and S - 1 runs of one level.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention import Block
from jaxspec.draft.base import CacheShape, DraftSettings, Observation
from jaxspec.draft.grow import Children, Frontier, Level
from jaxspec.draft.tree_draft import TreeDraft, positions_of
from jaxspec.kv_cache import Accepted, wait_for
from jaxspec.models.network import Network
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree


class Carry(NamedTuple):
    """What a row takes into the next round."""

    first: Children  # [B, topk], children of the bonus token
    hidden: jax.Array  # [B, E], the head's state that predicted them


@dataclasses.dataclass(frozen=True)
class Feature(TreeDraft):
    """A feature-level head's tree."""

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Feature":
        if network is None:
            raise ValueError("a feature-level draft needs draft_model: the head's checkpoint.")
        return cls(network, settings.shape, noise=settings.noise, processors=settings.processors)

    @property
    def capture(self) -> tuple[int | str, ...]:
        return self.network.config.capture

    def init(self, shape: CacheShape) -> DraftState:
        hidden = jnp.zeros((shape.num_rows, self.network.config.layer.hidden_size), shape.dtype)
        children = self.no_children(shape.num_rows, self.network.config.layer.vocab_size)
        return DraftState(self.empty_caches(shape), Carry(children, hidden))

    def propose(self, params: Any, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        head = self.network.bind(params)
        prefix_len = jnp.where(rows.active, rows.seq_len, 0)

        def run(frontier: Frontier) -> Level:
            pairs = positions_of(rows, frontier, first=0)
            block = Block(pairs, prefix_len, table, frontier.ancestors)
            out = head.extend(frontier.tokens, frontier.carry, block, state.caches, earlier=frontier.earlier)
            children = self.best_of(head.logits(out.state), pairs + 2, rows, frontier.paths)
            return Level(children, out.pending, out.hidden)

        carry: Carry = state.carry
        return self.grow_below(rows.bonus, carry.first, carry.hidden, head, run)

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        head = self.network.bind(params)
        offsets = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)
        block = Block(seen.start[:, None] + offsets, jnp.where(seen.count > 0, seen.start, 0), table)
        out = head.extend(seen.next_tokens, head.fuse(seen.features), block, state.caches)
        last = jnp.maximum(seen.count - 1, 0)[:, None, None]
        final, hidden = (jnp.take_along_axis(leaf, last, axis=1) for leaf in (out.state, out.hidden))
        position = (seen.start + seen.count + 1)[:, None]
        children = self.best_of(head.logits(final), position, rows)
        new = Carry(jax.tree.map(lambda leaf: leaf[:, 0], children), hidden[:, 0])
        path = jnp.broadcast_to(offsets, seen.tokens.shape)
        kept = Accepted(path, wait_for(seen.count, new.first.tokens[:, 0]))
        caches = head.commit(state.caches, out.pending, block, kept)
        return DraftState(caches, self.where_observed(seen, new, state.carry))
