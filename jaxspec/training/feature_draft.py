"""The objective of feature-level heads: training-time test (EAGLE-3, arXiv 2503.01840).

Each token that the target wrote is predicted as in drafting: at step 0 from the target's own features, at step s from
the head's own feature after s drafts, which were right. The index contract is that of `jaxspec.draft.feature`: a chain
with its anchor at place i reads, at step s, token i + 1 + s and predicts token i + 2 + s.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.models.heads import Head
from jaxspec.training.losses import LOSSES, Laws
from jaxspec.training.unrolled import UnrolledBlock


class Taught(NamedTuple):
    """Texts, and what the target makes of them."""

    ids: jax.Array  # int32 [B, T]
    is_answer: jax.Array  # bool [B, T]
    features: tuple[jax.Array, ...]  # [B, T, Ht] each: the layers that the head reads
    logits: jax.Array  # float32 [B, T, Vd]: the target's for the token after each, over the draft's vocabulary
    log_mass: jax.Array  # float32 [B, T]: log of the sum of exp over the target's whole vocabulary


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        loss: of `losses.LOSSES`.
        num_steps: S, the steps of a chain; step 0 has the target's features.
        step_decay: step s counts step_decay ** s.
    """

    loss: str = "kl"
    num_steps: int = 3
    step_decay: float = 0.8


class Losses(NamedTuple):
    """A batch's results, by step [S], as sums over `count` predictions; `total` is the mean to be minimised."""

    total: jax.Array
    loss: jax.Array
    agreed: jax.Array  # predictions whose likeliest token is the target's
    count: jax.Array


def unrolled_losses(head: Head, taught: Taught, objective: Objective, num_anchors: int) -> Losses:
    """Runs a head over texts, all anchors and steps.

    Args:
        head: its parameters are differentiated.
        taught: texts of one length.
        objective: see there.
        num_anchors: chains a text, at least as many as a text has tokens that count.
    """
    length = taught.ids.shape[1]
    anchors, is_anchor = _anchors(taught.is_answer, num_anchors)
    loss_of: Callable[[Laws], jax.Array] = LOSSES[objective.loss]
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), taught.ids.shape)
    block = UnrolledBlock(places, places, step=0)
    out = head.extend(_at(taught.ids, places + 1), head.fuse(taught.features), block, (None,))
    state, hidden = _at(out.state, anchors), _at(out.hidden, anchors)
    keys = [out.pending]
    results = []
    for step in range(objective.num_steps):
        if step:
            block = UnrolledBlock(anchors + step, anchors, step=step)
            earlier = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *keys)
            out = head.extend(_at(taught.ids, anchors + 1 + step), hidden, block, (None,), earlier=earlier)
            state, hidden = out.state, out.hidden
            keys.append(out.pending)
        taught_by = anchors + 1 + step
        law = _at(taught.logits, taught_by) - _at(taught.log_mass, taught_by)[..., None]
        laws = Laws(jax.nn.log_softmax(head.own_logits(state)), law)
        counts = is_anchor & (taught_by + 1 < length) & _at(taught.is_answer, taught_by + 1)
        agreed = jnp.argmax(laws.draft, axis=-1) == jnp.argmax(laws.target, axis=-1)
        results.append((jnp.sum(loss_of(laws) * counts), jnp.sum(agreed & counts), jnp.sum(counts)))
    loss, right, count = (jnp.stack(parts) for parts in zip(*results, strict=True))
    weights = objective.step_decay ** jnp.arange(objective.num_steps)
    total = jnp.sum(weights * loss / jnp.maximum(count, 1)) / jnp.sum(weights)
    return Losses(total, loss, right, count)


def _anchors(is_answer: jax.Array, num_anchors: int) -> tuple[jax.Array, jax.Array]:
    """The first places of each text of which the token two further counts: int32 and bool [B, num_anchors]."""
    two_further = jnp.pad(is_answer[:, 2:], ((0, 0), (0, 2)))
    order = jnp.argsort(~two_further, axis=1, stable=True)[:, :num_anchors]
    return order.astype(jnp.int32), jnp.take_along_axis(two_further, order, axis=1)


def _at(values: jax.Array, places: jax.Array) -> jax.Array:
    """Values [B, T, ...] at places [B, N]; the last one beyond the end."""
    places = jnp.minimum(places, values.shape[1] - 1)
    return jnp.take_along_axis(values, places.reshape(*places.shape, *[1] * (values.ndim - 2)), axis=1)
