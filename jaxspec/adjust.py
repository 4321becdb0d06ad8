"""What a request does to its logits before they are masked and drawn, in this order: bias, penalties, processors, bans.

Each depends on nothing but the row's settings and the tokens before the draw (`Context`), so that a node of a draft
tree is treated as plain decoding would treat it once its path is said. Where no row asks for anything, nothing is
computed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.context import Context
from jaxspec.state import Sampling
from jaxspec.tree import unpack_bits

NEG_INF = float("-inf")


class RowTokens(NamedTuple):
    """What a user's processor is told of its row, for one draw."""

    tokens: jax.Array  # int32 [S], prompt and output, drafts on the node's own path included
    num_tokens: jax.Array  # int32 scalar, how many of them there are; those behind mean nothing
    prompt_len: jax.Array  # int32 scalar, how many of them are the prompt's
    arguments: jax.Array  # float32 [num_arguments], the request's own numbers, 0 where it gave none


# A pure function of logits float32 [V] and the row's tokens, to logits; it is traced once, and may use jax.numpy.
Processor = Callable[[jax.Array, RowTokens], jax.Array]


def needs_adjusting(positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Whether some row asks for something of `adjust` at positions int32 [B, N]; bool scalar."""
    return jnp.any(jnp.stack(list(_needed(positions, sampling).values())))


def _needed(positions: jax.Array, sampling: Sampling) -> dict[str, jax.Array]:
    """Which stages some row needs; those that a request cannot ask for are not listed."""
    found = {
        "bias": sampling.bias_ids >= 0,
        "penalties": (sampling.presence != 0) | (sampling.frequency != 0) | (sampling.repetition != 1),
        "processors": sampling.processors,
        "banned": sampling.banned,
        "bad_words": sampling.bad_words >= 0,
        "stops": positions < sampling.min_len[:, None],
    }
    return {name: jnp.any(leaf) for name, leaf in found.items() if leaf.size}


def adjust(
    logits: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    context: Context,
    processors: tuple[Processor, ...] = (),
) -> jax.Array:
    """Applies what each row asks for to logits float32 [B, N, V].

    Args:
        logits: of the model.
        positions: int32 [B, N], absolute positions of the tokens to be drawn.
        sampling: parameters per row.
        context: the tokens before each draw.
        processors: the user's, in order; `sampling.processors` says which rows they are for.
    """
    stages: dict[str, Callable[[jax.Array], jax.Array]] = {
        "bias": lambda x: _add_bias(x, sampling),
        "penalties": lambda x: _penalise(x, sampling, context),
        "processors": lambda x: _process(x, sampling, context, processors),
        "banned": lambda x: _ban_tokens(x, sampling),
        "bad_words": lambda x: _ban_words(x, sampling, context),
        "stops": lambda x: ban_stops(x, positions, sampling),
    }
    needed = _needed(positions, sampling)

    def run(logits: jax.Array) -> jax.Array:
        for name, is_needed in needed.items():
            # A pass for those that need none costs less than the branch; counting and the user's code do not.
            if name in ("penalties", "processors"):
                logits = jax.lax.cond(is_needed, stages[name], lambda logits: logits, logits)
            else:
                logits = stages[name](logits)
        return logits

    return jax.lax.cond(needs_adjusting(positions, sampling), run, lambda logits: logits, logits)


def _add_bias(logits: jax.Array, sampling: Sampling) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, logits.shape[-1])
    return logits.at[rows, :, ids].add(sampling.bias[:, :, None], mode="drop")


def _penalise(logits: jax.Array, sampling: Sampling, context: Context) -> jax.Array:
    """The repetition penalty counts prompt and output, the other two the output alone."""
    in_prompt, in_output = context.counts(logits.shape[-1])
    presence, frequency, repetition = (
        leaf[:, None, None] for leaf in (sampling.presence, sampling.frequency, sampling.repetition)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((in_prompt > 0) | (in_output > 0), repeated, logits)
    return logits - frequency * in_output - jnp.where(in_output > 0, presence, 0.0)


def _process(logits: jax.Array, sampling: Sampling, context: Context, processors: tuple[Processor, ...]) -> jax.Array:
    tokens, num_tokens = context.tokens()
    for index, processor in enumerate(processors):
        of_nodes = jax.vmap(lambda x, *row, processor=processor: processor(x, RowTokens(*row)), (0, 0, 0, None, None))
        found = jax.vmap(of_nodes)(logits, tokens, num_tokens, context.prompt_len, sampling.arguments[:, index])
        logits = jnp.where(sampling.processors[:, index, None, None], found.astype(logits.dtype), logits)
    return logits


def _ban_tokens(logits: jax.Array, sampling: Sampling) -> jax.Array:
    return jnp.where(unpack_bits(sampling.banned, logits.shape[-1])[:, None], NEG_INF, logits)


def _ban_words(logits: jax.Array, sampling: Sampling, context: Context) -> jax.Array:
    """Bans the last token of a word whose other tokens were just emitted; a word lies in the output as a whole."""
    said = context.last_outputs(sampling.bad_words.shape[-1] - 1)[:, :, None]
    begins, last = sampling.bad_words[:, None, :, :-1], sampling.bad_words[:, None, :, -1]
    matches = jnp.all((begins < 0) | (begins == said), axis=-1) & (last >= 0)
    rows, nodes = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[None, :, None]
    return logits.at[rows, nodes, jnp.where(matches, last, logits.shape[-1])].set(NEG_INF, mode="drop")


def ban_stops(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Makes stop tokens impossible at absolute positions [B, N] below each row's `min_len`."""
    banned = positions < sampling.min_len[:, None]
    rows = jnp.arange(logits.shape[0])[:, None, None]
    nodes = jnp.arange(logits.shape[1])[None, :, None]
    ids = sampling.stop_ids[:, None, :]
    # Out of range is dropped; a -1 that fills the list would wrap to the last token.
    ids = jnp.where(banned[..., None] & (ids >= 0), ids, logits.shape[-1])
    return logits.at[rows, nodes, ids].set(NEG_INF, mode="drop")
