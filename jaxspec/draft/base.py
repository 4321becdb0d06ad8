"""What a draft method is: `init`, `propose`, `observe`, over device arrays, the same in every schedule.

A method is a frozen, hashable value: everything static about it (lengths, the draft model's definition) is in its
fields, and its weights come as an argument.
"""

import enum
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.adjust import Processor
from jaxspec.draft.shape import TreeShape
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree, chain_parents


class Noise(enum.Enum):
    """How a sampled row's drafts are drawn; it suits the rule that judges them."""

    SHARED = "with the noise of the target's own draw, and so they agree with it more often"
    OWN = "with noise that has nothing to do with it"
    FRESH = "with noise of their round alone, and the law of each draw is told"
    NONE = "not at all: the likeliest tokens are proposed"


class DraftSettings(NamedTuple):
    """What the resolved plan says about drafting."""

    shape: TreeShape
    noise: Noise
    ngram_min_match: int
    ngram_max_match: int
    processors: tuple[Processor, ...] = ()


class CacheShape(NamedTuple):
    """Size of the paged pools; a draft's pool has a slot for every slot of the target's, and shares its page table."""

    num_rows: int
    num_pages: int
    page_size: int
    dtype: jnp.dtype
    attention_backend: str = "xla"


class Observation(NamedTuple):
    """Tokens that were just committed, whether by a verdict or by a chunk of a prompt: the two are the same thing.

    Row b committed `tokens[b, :count[b]]` at positions `start[b]`...; `next_tokens[b, j]` follows `tokens[b, j]` (the
    last of them is the bonus, or the first token of the next chunk). Beyond `count` everything is garbage.
    """

    tokens: jax.Array  # int32 [B, M]
    next_tokens: jax.Array  # int32 [B, M]
    count: jax.Array  # int32 [B]
    start: jax.Array  # int32 [B]
    features: tuple[jax.Array, ...]  # [B, M, E] each: the target layers in `capture`


class DraftMethod(Protocol):
    """How drafts are made."""

    @property
    def num_steps(self) -> int:
        """Longest draft path, in tokens."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Nodes of the tree, root included."""
        ...

    @property
    def is_chain(self) -> bool:
        """Whether every tree is a chain, so that causal order is the mask."""
        ...

    @property
    def capture(self) -> tuple[int | str, ...]:
        """What `observe` wants of the target, see `Decoder.extend`."""
        ...

    def init(self, shape: CacheShape) -> DraftState:
        """Empty state; dtypes are written out, because a weakly typed array compiles the step twice."""
        ...

    def propose(self, params: Any, state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        """A tree rooted at each row's bonus token. Writes nothing that outlives the round."""
        ...

    def observe(self, params: Any, state: DraftState, rows: Rows, table: jax.Array, seen: Observation) -> DraftState:
        """Takes in committed tokens; `rows` are already advanced past them."""
        ...


def chain_tree(rows: Rows, drafts: jax.Array, scores: jax.Array | None = None) -> DraftTree:
    """The bonus token and a chain of drafts int32 [B, S] behind it; their scores, if any, float32 [B, S]."""
    tokens = jnp.concatenate([rows.bonus[:, None], drafts], axis=1)
    return DraftTree(
        tokens, chain_parents(*tokens.shape), None if scores is None else jnp.pad(scores, ((0, 0), (1, 0)))
    )
