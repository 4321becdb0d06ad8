"""What is minimised: how far a draft's law is from the target's, token by token."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Weight of KL against total variation in "lk_hybrid" falls with the acceptance (LK losses, arXiv 2602.23881).
_HYBRID_DECAY = 3.0


class Laws(NamedTuple):
    """Two laws over the draft's vocabulary; the target's leaves some of its mass to other tokens."""

    draft: jax.Array  # float32 [..., Vd], log probabilities
    target: jax.Array  # float32 [..., Vd], log probabilities over the target's whole vocabulary


def acceptance(laws: Laws) -> jax.Array:
    """Chance that a draft drawn from one law is accepted by the other: the sum of min(p, q), float32 [...]."""
    return jnp.sum(jnp.exp(jnp.minimum(laws.draft, laws.target)), axis=-1)


def kl(laws: Laws) -> jax.Array:
    """KL divergence of the draft's law from the target's within the draft's vocabulary, renormalised: float32 [...]."""
    target = jax.nn.log_softmax(laws.target)
    return jnp.sum(jnp.exp(target) * (target - laws.draft), axis=-1)


def lk_alpha(laws: Laws) -> jax.Array:
    """Minus the log of the acceptance (LK losses, arXiv 2602.23881): float32 [...]."""
    return -jnp.log(jnp.maximum(acceptance(laws), 1e-6))


def lk_hybrid(laws: Laws) -> jax.Array:
    """KL where acceptance is low, total variation where it is high (LK losses): float32 [...]."""
    accepted = acceptance(laws)
    share = jnp.exp(-_HYBRID_DECAY * jax.lax.stop_gradient(accepted))
    return share * kl(laws) + (1 - share) * (1 - accepted)


LOSSES: dict[str, Callable[[Laws], jax.Array]] = {"kl": kl, "lk_alpha": lk_alpha, "lk_hybrid": lk_hybrid}
