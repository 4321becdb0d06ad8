"""Two methods fill one tree: where one guesses wrong the other may be right, and both are verified by one pass."""

import dataclasses
from typing import Any

import jax

from jaxspec.draft.base import CacheShape, DraftMethod, Observation
from jaxspec.draft.unite import unite_trees
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree


@dataclasses.dataclass(frozen=True)
class Merged:
    """The best nodes of two methods' trees, by each method's own estimate that a node is accepted.

    Its parameters are the two methods', as a tuple.

    Attributes:
        methods: both score their drafts. Where nodes tie, the first one's go before.
        num_draft_tokens: nodes of the one tree, root included.
    """

    methods: tuple[DraftMethod, DraftMethod]
    num_draft_tokens: int
    is_chain: bool = False

    @property
    def num_steps(self) -> int:
        return max(method.num_steps for method in self.methods)

    @property
    def capture(self) -> tuple[int | str, ...]:
        first, second = self.methods
        return (*first.capture, *second.capture)

    def init(self, shape: CacheShape) -> DraftState:
        first, second = (method.init(shape) for method in self.methods)
        return DraftState((first.caches, second.caches), (first.carry, second.carry))

    def propose(self, params: Any, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        trees = [
            method.propose(own, mine, rows, table)
            for method, own, mine in zip(self.methods, params, self._split(state), strict=True)
        ]
        return unite_trees(trees, depth=self.num_steps, num_nodes=self.num_draft_tokens)

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        middle = len(self.methods[0].capture)
        features = (seen.features[:middle], seen.features[middle:])
        first, second = (
            method.observe(own, mine, rows, table, seen._replace(features=wanted))
            for method, own, mine, wanted in zip(self.methods, params, self._split(state), features, strict=True)
        )
        return DraftState((first.caches, second.caches), (first.carry, second.carry))

    def _split(self, state: DraftState) -> tuple[DraftState, DraftState]:
        (caches, other_caches), (carry, other_carry) = state.caches, state.carry
        return DraftState(caches, carry), DraftState(other_caches, other_carry)
