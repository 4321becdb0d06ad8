"""What lives on the device from round to round.

Arrays have one row per request slot. A dispatch names the slots it runs (`take`), works on those rows, and puts them
back (`put`); padding names a slot that does not exist, so its reads are clipped and its writes are dropped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.tree import WORD_BITS


class Widths(NamedTuple):
    """How much of each kind a request may bring; what has width 0 takes no part in the compiled steps."""

    num_biases: int = 0
    banned_vocab: int = 0  # the vocabulary's size, where tokens may be banned
    num_bad_words: int = 0  # of two tokens and more
    bad_word_len: int = 0
    num_processors: int = 0
    num_arguments: int = 0  # of each processor


NO_WIDTHS = Widths()


class Sampling(NamedTuple):
    """How each row's tokens are drawn; arrays, never static, so that no mixture of requests compiles anew."""

    temperature: jax.Array  # float32 [B]; 0 is greedy
    top_k: jax.Array  # int32 [B]; 0 is off
    top_p: jax.Array  # float32 [B]; 1 is off
    min_p: jax.Array  # float32 [B]; 0 is off
    seed: jax.Array  # uint32 [B, 2], high and low word
    stop_ids: jax.Array  # int32 [B, E]; -1 fills
    min_len: jax.Array  # int32 [B]; a token at an absolute position below this may not be a stop
    want_logprobs: jax.Array  # bool [B]
    want_prompt_logprobs: jax.Array  # bool [B]
    prompt_len: jax.Array  # int32 [B]; tokens from this absolute position on are output
    speculate: jax.Array  # bool [B]; whether drafts are judged
    presence: jax.Array  # float32 [B]; 0 is off
    frequency: jax.Array  # float32 [B]; 0 is off
    repetition: jax.Array  # float32 [B]; 1 is off
    bias_ids: jax.Array  # int32 [B, num_biases]; -1 fills
    bias: jax.Array  # float32 [B, num_biases]
    banned: jax.Array  # uint32 [B, words], a bit for each token that is never drawn
    bad_words: jax.Array  # int32 [B, num_bad_words, bad_word_len]; -1 fills, in front of the words' tokens
    processors: jax.Array  # bool [B, num_processors], which ones apply
    arguments: jax.Array  # float32 [B, num_processors, num_arguments]

    @classmethod
    def zeros(cls, num_rows: int, num_stop_ids: int, widths: Widths = NO_WIDTHS, *, xp: Any = jnp) -> "Sampling":
        """Greedy rows without stops, in arrays of the library `xp` (jax.numpy or numpy)."""
        processors = (num_rows, widths.num_processors)
        return cls(
            temperature=xp.zeros(num_rows, xp.float32),
            top_k=xp.zeros(num_rows, xp.int32),
            top_p=xp.ones(num_rows, xp.float32),
            min_p=xp.zeros(num_rows, xp.float32),
            seed=xp.zeros((num_rows, 2), xp.uint32),
            stop_ids=xp.full((num_rows, num_stop_ids), -1, xp.int32),
            min_len=xp.zeros(num_rows, xp.int32),
            want_logprobs=xp.zeros(num_rows, bool),
            want_prompt_logprobs=xp.zeros(num_rows, bool),
            prompt_len=xp.zeros(num_rows, xp.int32),
            speculate=xp.ones(num_rows, bool),
            presence=xp.zeros(num_rows, xp.float32),
            frequency=xp.zeros(num_rows, xp.float32),
            repetition=xp.ones(num_rows, xp.float32),
            bias_ids=xp.full((num_rows, widths.num_biases), -1, xp.int32),
            bias=xp.zeros((num_rows, widths.num_biases), xp.float32),
            banned=xp.zeros((num_rows, -(-widths.banned_vocab // WORD_BITS)), xp.uint32),
            bad_words=xp.full((num_rows, widths.num_bad_words, widths.bad_word_len), -1, xp.int32),
            processors=xp.zeros(processors, bool),
            arguments=xp.zeros((*processors, widths.num_arguments), xp.float32),
        )


class Rows(NamedTuple):
    """One request per row. The bonus token sits at position `seq_len`: emitted, in `history`, not in the cache."""

    bonus: jax.Array  # int32 [B], last emitted token
    seq_len: jax.Array  # int32 [B], tokens whose keys and values are committed
    remaining: jax.Array  # int32 [B], tokens that may still be emitted
    active: jax.Array  # bool [B]
    history: jax.Array  # int32 [B, max_model_len], prompt and output; beyond seq_len it means nothing
    sampling: Sampling

    @classmethod
    def zeros(cls, num_rows: int, max_model_len: int, num_stop_ids: int, widths: Widths = NO_WIDTHS) -> "Rows":
        return cls(
            bonus=jnp.zeros(num_rows, jnp.int32),
            seq_len=jnp.zeros(num_rows, jnp.int32),
            remaining=jnp.zeros(num_rows, jnp.int32),
            active=jnp.zeros(num_rows, bool),
            history=jnp.zeros((num_rows, max_model_len), jnp.int32),
            sampling=Sampling.zeros(num_rows, num_stop_ids, widths),
        )

    def adopt(self, row: jax.Array, tokens: jax.Array) -> "Rows":
        """Gives one row the tokens int32 [max_model_len] of a sequence whose keys and values are in pages already."""
        return self._replace(history=self.history.at[row].set(tokens, mode="drop"))

    def write_history(self, tokens: jax.Array, start: jax.Array, count: jax.Array) -> "Rows":
        """Writes tokens [B, M] at positions start .. start + count of each row."""
        offsets = jnp.arange(tokens.shape[1])
        positions = jnp.where(offsets < count[:, None], start[:, None] + offsets, self.history.shape[1])
        rows = jnp.arange(tokens.shape[0])[:, None]
        return self._replace(history=self.history.at[rows, positions].set(tokens, mode="drop"))


class DraftState(NamedTuple):
    """What a draft method keeps: paged caches that all rows share, and a carry with one row per request."""

    caches: Any
    carry: Any


class State(NamedTuple):
    """The whole device state; donated to every step."""

    rows: Rows
    caches: Any
    draft: DraftState


def take(tree: Any, row_ids: jax.Array) -> Any:
    """Rows `row_ids` [b] of every leaf; an id out of range reads some row, and means nothing."""
    return jax.tree.map(lambda leaf: leaf.at[row_ids].get(mode="clip"), tree)


def put(tree: Any, row_ids: jax.Array, rows: Any) -> Any:
    """Writes rows back; an id out of range is dropped."""
    return jax.tree.map(lambda leaf, new: leaf.at[row_ids].set(new, mode="drop"), tree, rows)
