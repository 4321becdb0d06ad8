"""STANDALONE: a second, smaller checkpoint of the same tokenizer drafts a chain.

The draft has its own paged cache, under the target's page table. It is fed every accepted token and the bonus, so a
round starts with its cache complete and its first proposal made: `num_steps` = S costs one extend and S - 1 forwards
of a single token. Its own chain lives in activations and never enters the pool.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.attention import Block
from jaxspec.draft.base import CacheShape, DraftSettings, Observation, chain_tree
from jaxspec.kv_cache import Accepted, wait_for
from jaxspec.models.network import Network
from jaxspec.sampling import draw
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree, pack_bits


@dataclasses.dataclass(frozen=True)
class Standalone:
    """A draft model's chain, drawn with the target's noise."""

    network: Network
    num_steps: int
    target_vocab: int
    is_chain: bool = True
    capture: tuple[int, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Standalone":
        if network is None:
            raise ValueError("STANDALONE needs draft_model: a second checkpoint with the target's tokenizer.")
        return cls(network, settings.num_steps, target_vocab)

    @property
    def num_draft_tokens(self) -> int:
        return self.num_steps + 1

    def init(self, shape: CacheShape) -> DraftState:
        caches = self.network.init_cache(num_pages=shape.num_pages, page_size=shape.page_size, dtype=shape.dtype)
        return DraftState(caches, jnp.zeros(shape.num_rows, jnp.int32))

    def _draw(self, logits: jax.Array, positions: jax.Array, rows: Rows) -> jax.Array:
        """Draws from draft logits [B, 1, Vd] at positions [B, 1], over the target's vocabulary."""
        missing = self.target_vocab - logits.shape[-1]
        if missing > 0:
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
        return draw(logits[..., : self.target_vocab], positions, rows.sampling)

    def propose(self, params: Any, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        model = self.network.bind(params)
        first: jax.Array = state.carry
        prefix_len = jnp.where(rows.active, rows.seq_len + 1, 0)  # the bonus is in the draft's cache
        chain_len = self.num_steps - 1
        if chain_len == 0:
            return chain_tree(rows, first[:, None])

        def step(carry, depth):
            token, chain = carry
            positions = (rows.seq_len + 1 + depth)[:, None]
            # A slot of the chain is visible once it is written, and the new token always.
            visible = jnp.append(jnp.arange(chain_len) < depth, True)
            ancestors = jnp.broadcast_to(pack_bits(visible), (token.shape[0], 1, -(-(chain_len + 1) // 32)))
            block = Block(positions, prefix_len, table, ancestors)
            out = model.extend(token[:, None], block, state.caches, earlier=chain)
            chain = jax.tree.map(
                lambda slots, new: jax.lax.dynamic_update_slice_in_dim(slots, new, depth, axis=2), chain, out.pending
            )
            token = self._draw(model.logits(out.hidden), positions + 1, rows)[:, 0]
            return (token, chain), token

        empty = model.empty_pending(first.shape[0], chain_len)
        _, rest = jax.lax.scan(step, (first, empty), jnp.arange(chain_len, dtype=jnp.int32))
        return chain_tree(rows, jnp.concatenate([first[:, None], rest.T], axis=1))

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
        first = self._draw(model.logits(hidden), position, rows)[:, 0]
        path = jnp.broadcast_to(offsets, tokens.shape)
        kept = Accepted(path, wait_for(jnp.where(seen.count > 0, seen.count + 1, 0), first))
        caches = model.commit(state.caches, out.pending, block, kept)
        return DraftState(caches, jnp.where(seen.count > 0, first, state.carry))
