"""The objective of drafts that are models of their own: the next token, as the target would choose it."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.decoder import Decoder
from jaxspec.training.losses import LOSSES, Laws
from jaxspec.training.taught import Losses, Taught, anchors, rows_at
from jaxspec.training.unrolled import UnrolledBlock


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Distils the target's laws after every place of a text.

    Attributes:
        loss: of `losses.LOSSES`; "kl" is the forward KL divergence.
        num_steps: drafts a chain, for the simulated accept length: each is as good as the one before it.
    """

    loss: str = "kl"
    num_steps: int = 3

    def losses(self, draft: Decoder, taught: Taught, num_anchors: int) -> Losses:
        """Runs a decoder over texts; see `Objective.losses`."""
        every = jnp.broadcast_to(jnp.arange(taught.ids.shape[1], dtype=jnp.int32), taught.ids.shape)
        hidden = draft.extend(taught.ids, UnrolledBlock(every, every, step=0), (None,)).hidden
        places, counts = anchors(taught.is_answer, 1, num_anchors)
        laws = Laws(jax.nn.log_softmax(draft.logits(rows_at(hidden, places))), taught.law(places))
        agreed = jnp.argmax(laws.draft, axis=-1) == jnp.argmax(laws.target, axis=-1)
        sums = (jnp.sum(LOSSES[self.loss](laws) * counts), jnp.sum(agreed & counts), jnp.sum(counts))
        loss, right, count = (jnp.broadcast_to(one, (self.num_steps,)) for one in sums)
        return Losses(loss[0] / jnp.maximum(count[0], 1), loss, right, count)
