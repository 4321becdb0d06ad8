"""What the methods share that grow a tree from a network of their own, over a paged cache of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.adjust import Processor, adjust
from jaxspec.context import Context
from jaxspec.draft.base import CacheShape, Noise, Observation
from jaxspec.draft.grow import Children, Frontier, Level, best_children, grow
from jaxspec.draft.shape import Shaped, TreeShape
from jaxspec.kv_cache import Cache
from jaxspec.models.network import Network
from jaxspec.sampling import fresh_seeds, law, perturb
from jaxspec.state import Rows
from jaxspec.tree import DraftTree

# Turns a request's seed into one whose noise has nothing to do with it.
_OTHER_SEED = 0x5BD1E995
# What noise is for, besides the purposes in `rules`.
DRAFTS = 3


@dataclasses.dataclass(frozen=True)
class TreeDraft(Shaped):
    """A draft network and the tree that it fills; a chain is the tree of one branch."""

    network: Network
    shape: TreeShape
    noise: Noise = dataclasses.field(default=Noise.SHARED, kw_only=True)
    processors: tuple[Processor, ...] = dataclasses.field(default=(), kw_only=True)

    def empty_caches(self, shape: CacheShape) -> tuple[Cache, ...]:
        return self.network.init_cache(
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            num_rows=shape.num_rows,
            dtype=shape.dtype,
            backend=shape.attention_backend,
        )

    def no_children(self, num_rows: int, vocab_size: int) -> Children:
        """First proposals of rows that have observed nothing."""
        size = (num_rows, self.shape.topk)
        laws = jnp.zeros((num_rows, vocab_size), jnp.float32) if self.noise is Noise.FRESH else None
        return Children(jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.float32), laws)

    def best_of(self, logits: jax.Array, positions: jax.Array, rows: Rows, paths: jax.Array | None = None) -> Children:
        """The best tokens at absolute positions [B, K] by draft logits float32 [B, K, V].

        `paths` int32 [B, K, D] are the drafts down to each node; None where they follow the bonus token.
        """
        sampling = rows.sampling
        context = Context.of(rows, None if paths is None else lambda: paths)
        logits = adjust(logits, positions, sampling, context, self.processors)
        if self.noise is Noise.NONE:
            return best_children(logits, self.shape)
        if self.noise is Noise.FRESH:
            seeds = fresh_seeds(sampling.seed, DRAFTS, rows.seq_len)
            children = best_children(perturb(logits, positions, sampling._replace(seed=seeds)), self.shape)
            return children._replace(laws=law(logits, sampling))
        if self.noise is Noise.OWN:
            sampling = sampling._replace(seed=sampling.seed ^ _OTHER_SEED)
        return best_children(perturb(logits, positions, sampling), self.shape)

    def grow_below(
        self, bonus: jax.Array, first: Children, carry: Any, model: Any, run: Callable[[Frontier], Level]
    ) -> DraftTree:
        """`grow`, with room for what `model` leaves pending above the last level."""
        room = model.empty_pending(bonus.shape[0], (self.shape.num_steps - 1) * self.shape.width)
        return grow(bonus, first, carry, room, self.shape, run)

    @staticmethod
    def where_observed(seen: Observation, new: Any, old: Any) -> Any:
        """Leaves [B, X] of rows that observed something; the others keep theirs."""
        observed = (seen.count > 0)[:, None]
        return jax.tree.map(lambda fresh, kept: jnp.where(observed, fresh, kept), new, old)


def positions_of(rows: Rows, frontier: Frontier, first: int) -> jax.Array:
    """int32 [B, K]: `first` behind the committed tokens at depth 0, and one more with each level."""
    return jnp.broadcast_to((rows.seq_len + first + frontier.depth)[:, None], frontier.tokens.shape)
