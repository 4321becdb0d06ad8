"""NONE: no drafts. Plain decoding is the round of a tree that is only its root."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.draft.base import CacheShape, DraftSettings, Observation, chain_tree
from jaxspec.models.network import Network
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Plain:
    """Proposes nothing."""

    num_steps: int = 0
    num_draft_tokens: int = 1
    is_chain: bool = True
    capture: tuple[int | str, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Plain":
        return cls()

    def init(self, shape: CacheShape) -> DraftState:
        return DraftState((), ())

    def propose(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        return chain_tree(rows, jnp.zeros((rows.bonus.shape[0], 0), jnp.int32))

    def observe(self, params: tuple, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        return state
