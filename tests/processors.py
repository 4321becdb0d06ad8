"""Logits processors as a user writes them: each needs to know the drafts on a node's own path."""

import jax
import jax.numpy as jnp

from jaxspec.adjust import RowTokens


def change_parity(logits: jax.Array, row: RowTokens) -> jax.Array:
    """After an even token only odd ones, and the other way round."""
    last = row.tokens[row.num_tokens - 1]
    return jnp.where(jnp.arange(logits.shape[0]) % 2 == last % 2, -jnp.inf, logits)


def favour_in_turn(logits: jax.Array, row: RowTokens) -> jax.Array:
    """Adds its second number to the logit of the output's length times its first number."""
    favoured = (row.num_tokens - row.prompt_len) * row.arguments[0].astype(jnp.int32) % logits.shape[0]
    return logits.at[favoured].add(row.arguments[1])


PROCESSORS = {"change_parity": change_parity, "favour_in_turn": favour_in_turn}
