"""The objective of feature-level heads: training-time test (EAGLE-3, arXiv 2503.01840).

Each token that the target wrote is predicted as in drafting: at step 0 from the target's own features, at step s from
the head's own feature after s drafts, which were right. The index contract is that of `jaxspec.draft.feature`: a chain
with its anchor at place i reads, at step s, token i + 1 + s and predicts token i + 2 + s.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.models.heads import Head
from jaxspec.training.losses import LOSSES, Laws
from jaxspec.training.taught import Losses, Taught, anchors, rows_at
from jaxspec.training.unrolled import UnrolledBlock


@dataclasses.dataclass(frozen=True)
class TrainingTimeTest:
    """Unrolls a head's chains over texts.

    Attributes:
        loss: of `losses.LOSSES`.
        num_steps: S, the steps of a chain; step 0 has the target's features.
        step_decay: step s counts step_decay ** s.
    """

    loss: str = "kl"
    num_steps: int = 3
    step_decay: float = 0.8

    def losses(self, draft: Head, taught: Taught, num_anchors: int) -> Losses:
        """Runs all anchors and steps; see `Objective.losses`."""
        length = taught.ids.shape[1]
        places, is_anchor = anchors(taught.is_answer, 2, num_anchors)
        loss_of: Callable[[Laws], jax.Array] = LOSSES[self.loss]
        every = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), taught.ids.shape)
        block = UnrolledBlock(every, every, step=0)
        out = draft.extend(rows_at(taught.ids, every + 1), draft.fuse(taught.features), block, (None,))
        state, hidden = rows_at(out.state, places), rows_at(out.hidden, places)
        keys = [out.pending]
        results = []
        for step in range(self.num_steps):
            if step:
                block = UnrolledBlock(places + step, places, step=step)
                earlier = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *keys)
                out = draft.extend(rows_at(taught.ids, places + 1 + step), hidden, block, (None,), earlier=earlier)
                state, hidden = out.state, out.hidden
                keys.append(out.pending)
            taught_by = places + 1 + step
            laws = Laws(jax.nn.log_softmax(draft.own_logits(state)), taught.law(taught_by))
            counts = is_anchor & (taught_by + 1 < length) & rows_at(taught.is_answer, taught_by + 1)
            agreed = jnp.argmax(laws.draft, axis=-1) == jnp.argmax(laws.target, axis=-1)
            results.append((jnp.sum(loss_of(laws) * counts), jnp.sum(agreed & counts), jnp.sum(counts)))
        loss, right, count = (jnp.stack(parts) for parts in zip(*results, strict=True))
        weights = self.step_decay ** jnp.arange(self.num_steps)
        total = jnp.sum(weights * loss / jnp.maximum(count, 1)) / jnp.sum(weights)
        return Losses(total, loss, right, count)
