"""What a draft is taught from: texts, what the target makes of them, and which predictions count."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Taught(NamedTuple):
    """Texts, and what the target makes of them."""

    ids: jax.Array  # int32 [B, T]
    is_answer: jax.Array  # bool [B, T]
    features: tuple[jax.Array, ...]  # [B, T, Ht] each: the layers that a head reads
    logits: jax.Array  # float32 [B, T, Vd]: the target's for the token after each, over the draft's vocabulary
    log_mass: jax.Array  # float32 [B, T]: log of the sum of exp over the target's whole vocabulary

    def law(self, places: jax.Array) -> jax.Array:
        """The target's log probabilities of the token after places [B, N], float32 [B, N, Vd]."""
        return rows_at(self.logits, places) - rows_at(self.log_mass, places)[..., None]


class Losses(NamedTuple):
    """A batch's results, by step of a chain [S], as sums over `count` predictions; `total` is to be minimised."""

    total: jax.Array
    loss: jax.Array
    agreed: jax.Array  # predictions whose likeliest token is the target's
    count: jax.Array


class Objective(Protocol):
    """What is minimised; hashable, so that it can be static."""

    def losses(self, draft: Any, taught: Taught, num_anchors: int) -> Losses:
        """Runs a draft over texts.

        Args:
            draft: its parameters are differentiated.
            taught: texts of one length.
            num_anchors: predictions a text at each step, at least as many as a text has tokens that count.
        """
        ...


def anchors(is_answer: jax.Array, ahead: int, count: int) -> tuple[jax.Array, jax.Array]:
    """The first places of each text of which the token `ahead` places further counts: int32 and bool [B, count]."""
    further = jnp.pad(is_answer[:, ahead:], ((0, 0), (0, ahead)))
    order = jnp.argsort(~further, axis=1, stable=True)[:, :count]
    return order.astype(jnp.int32), jnp.take_along_axis(further, order, axis=1)


def rows_at(values: jax.Array, places: jax.Array) -> jax.Array:
    """Values [B, T, ...] at places [B, N]; the last one beyond the end."""
    places = jnp.minimum(places, values.shape[1] - 1)
    return jnp.take_along_axis(values, places.reshape(*places.shape, *[1] * (values.ndim - 2)), axis=1)
