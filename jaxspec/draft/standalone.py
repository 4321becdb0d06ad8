"""STANDALONE: a second, smaller checkpoint of the same tokenizer drafts a chain or a tree.

The draft has its own paged cache, under the target's page table. It is fed every accepted token and the bonus, so a
round starts with its cache complete and its first proposals made: `num_steps` = S costs one extend and S - 1 forwards
of one level. Its own drafts live in activations and never enter the pool.
"""

import dataclasses
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Standalone(TreeDraft):
    """A draft model's tree."""

    target_vocab: int
    capture: tuple[int | str, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Standalone":
        if network is None:
            raise ValueError("STANDALONE needs draft_model: a second checkpoint with the target's tokenizer.")
        return cls(
            network,
            settings.shape,
            target_vocab,
            noise=settings.noise,
            processors=settings.processors,
        )

    def init(self, shape: CacheShape) -> DraftState:
        return DraftState(self.empty_caches(shape), self.no_children(shape.num_rows, self.target_vocab))

    def _children(
        self, logits: jax.Array, positions: jax.Array, rows: Rows, paths: jax.Array | None = None
    ) -> Children:
        """The best tokens at positions [B, K] by draft logits [B, K, Vd], over the target's vocabulary."""
        missing = self.target_vocab - logits.shape[-1]
        if missing > 0:
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return self.best_of(logits[..., : self.target_vocab], positions, rows, paths)

    def propose(self, params: Any, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        model = self.network.bind(params)
        prefix_len = jnp.where(rows.active, rows.seq_len + 1, 0)  # the bonus is in the draft's cache

        def run(frontier: Frontier) -> Level:
            positions = positions_of(rows, frontier, first=1)
            block = Block(positions, prefix_len, table, frontier.ancestors)
            out = model.extend(frontier.tokens, block, state.caches, earlier=frontier.earlier)
            children = self._children(model.logits(out.hidden), positions + 1, rows, frontier.paths)
            return Level(children, out.pending, ())

        return self.grow_below(rows.bonus, state.carry, (), model, run)

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        model = self.network.bind(params)
        # One more row than was committed: the token after the last one. The first row is in the cache already (or is
        # the prompt's first token); writing it again is harmless and keeps one shape for prompts and verdicts.
        tokens = jnp.concatenate([seen.tokens[:, :1], seen.next_tokens], axis=1)
        offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        block = Block(seen.start[:, None] + offsets, jnp.where(seen.count > 0, seen.start, 0), table)
        out = model.extend(tokens, block, state.caches)
        hidden = jnp.take_along_axis(out.hidden, seen.count[:, None, None], axis=1)
        position = (seen.start + seen.count + 1)[:, None]
        first = jax.tree.map(lambda leaf: leaf[:, 0], self._children(model.logits(hidden), position, rows))
        path = jnp.broadcast_to(offsets, tokens.shape)
        kept = Accepted(path, wait_for(jnp.where(seen.count > 0, seen.count + 1, 0), first.tokens[:, 0]))
        caches = model.commit(state.caches, out.pending, block, kept)
        return DraftState(caches, self.where_observed(seen, first, state.carry))
