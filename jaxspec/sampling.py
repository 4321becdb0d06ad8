"""Drawing tokens: one sampler for plain decoding, for verification and for drafts.

A token is drawn as argmax(masked logits / temperature + Gumbel noise), with the noise keyed by (request seed, absolute
position of the token). The draw at a position therefore does not depend on the draft, the tree, the schedule, the
batch or a preemption, and a draft that uses the same noise is accepted about as often as any coupling allows
(drafter-invariant speculative decoding, arXiv 2408.07978).
"""

import jax
import jax.numpy as jnp

from jaxspec.adjust import NEG_INF, Processor, adjust, needs_adjusting
from jaxspec.context import Context
from jaxspec.state import Sampling


def gumbel_noise(seeds: jax.Array, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise, float32 [B, N, V], from seeds uint32 [B, 2] and absolute positions int32 [B, N]."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)))(seeds, positions)


def fresh_seeds(seeds: jax.Array, purpose: int, roots: jax.Array) -> jax.Array:
    """Seeds uint32 [B, 2] for one purpose in the round that starts at positions int32 [B], and for nothing else."""

    def one(seed: jax.Array, root: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        # No position is that large: what is folded in here is folded in nowhere else.
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, 2**32 - purpose), root))

    return jax.vmap(one)(seeds, roots)


def _ordered(x: jax.Array) -> jax.Array:
    """Maps float32 to uint32 so that order is kept (NaN aside)."""
    sign = jnp.uint32(1 << 31)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == sign, jnp.uint32(0), bits)  # -0 ties with 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | sign)


def _largest(holds, shape: tuple[int, ...]) -> jax.Array:
    """The largest uint32 threshold per element for which `holds` is true, by bisection; `holds` is monotone."""

    def try_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(shape, jnp.uint32))


def mask_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Applies top-k, then top-p over what top-k left, then min-p; logits [B, N, V] are already divided by temperature.

    Ties at the k-th value are all kept, as are ties at the edge of the nucleus, and the likeliest token always is.
    Thresholds are found by bisection on the bits of the values: 32 passes over the logits, no sort, and none where no
    row asks for the mask.
    """
    top_k, top_p, min_p = (x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    keys = _ordered(logits)
    shape = (*logits.shape[:-1], 1)

    def search(is_needed: jax.Array, holds) -> jax.Array:
        """The threshold, or 0 where nobody needs one: the passes take longer than all else in a sampled round."""
        return jax.lax.cond(jnp.any(is_needed), lambda: _largest(holds, shape), lambda: jnp.zeros(shape, jnp.uint32))

    kth = search(top_k > 0, lambda t: jnp.sum(keys >= t, axis=-1, keepdims=True) >= top_k)
    logits = jnp.where((top_k > 0) & (keys < kth), NEG_INF, logits)
    probs = jax.nn.softmax(logits, axis=-1)
    edge = search(top_p < 1, lambda t: jnp.sum(jnp.where(keys >= t, probs, 0.0), axis=-1, keepdims=True) >= top_p)
    # A top_p that is 0 in float32 is reached by no token at all.
    edge = jnp.minimum(edge, jnp.max(keys, axis=-1, keepdims=True))
    logits = jnp.where((top_p < 1) & (keys < edge), NEG_INF, logits)
    too_small = probs < min_p * jnp.max(probs, axis=-1, keepdims=True)
    return jnp.where((min_p > 0) & too_small, NEG_INF, logits)


def scale(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Adjusted logits over the temperature, masked: float32 [B, N, V]; a greedy row's mean nothing."""
    sampled = sampling.temperature > 0
    masked = sampled & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    # A greedy row in a mixed batch divides by 1: it must not depend on its neighbours.
    scaled = logits / jnp.where(sampled, sampling.temperature, 1.0)[:, None, None]
    return jax.lax.cond(jnp.any(masked), lambda x: mask_logits(x, sampling), lambda x: x, scaled)


def perturb(logits: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """Scores whose argmax is the token drawn; the runners-up are what a draft tree branches over.

    A sampled row's scores are its masked logits over the temperature plus the noise of the position (so that the best
    k of them are a draw of k tokens without replacement, by Gumbel-top-k); a greedy row's are its logits.

    Args:
        logits: float32 [B, N, V], from `adjust`.
        positions: int32 [B, N], absolute positions of the tokens to be drawn.
        sampling: parameters per row.

    Returns:
        float32 [B, N, V].
    """
    sampled = sampling.temperature > 0

    def with_noise(logits: jax.Array) -> jax.Array:
        noise = gumbel_noise(sampling.seed, positions, logits.shape[-1])
        return jnp.where(sampled[:, None, None], scale(logits, sampling) + noise, logits)

    return jax.lax.cond(jnp.any(sampled), with_noise, lambda logits: logits, logits)


def law(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Probabilities of each draw, float32 [B, N, V], from logits out of `adjust`; a greedy row's are 0 and 1."""
    drawn = jax.nn.softmax(scale(logits, sampling), axis=-1)
    is_best = best_token(logits)[..., None] == jnp.arange(logits.shape[-1])
    return jnp.where((sampling.temperature > 0)[:, None, None], drawn, is_best)


def best_token(scores: jax.Array) -> jax.Array:
    """The first of the largest scores: int32 [...] from float32 [..., V]."""

    def two_passes(scores: jax.Array) -> jax.Array:
        # XLA's CPU programs reduce one value at a time where an index goes along (ten times as long), and a maximum
        # and a minimum with vectors. No score equals a maximum that is NaN: the last token stands for it.
        is_best = scores == jnp.max(scores, axis=-1, keepdims=True)
        last = scores.shape[-1] - 1
        return jnp.min(jnp.where(is_best, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)

    def one_pass(scores: jax.Array) -> jax.Array:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    return jax.lax.platform_dependent(scores, cpu=two_passes, default=one_pass)


def draw(
    logits: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    context: Context,
    processors: tuple[Processor, ...] = (),
) -> jax.Array:
    """Draws one token per node: int32 [B, N] from logits [B, N, V]; see `adjust` and `perturb`."""

    def from_scores(logits: jax.Array) -> jax.Array:
        return best_token(perturb(adjust(logits, positions, sampling, context, processors), positions, sampling))

    # The scores of greedy rows that ask for nothing are their logits; that no branch returns scores saves two copies.
    is_simple = ~(jnp.any(sampling.temperature > 0) | needs_adjusting(positions, sampling))
    return jax.lax.cond(is_simple, best_token, from_scores, logits)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, num_top: int, wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the model's own law (before temperature and masks).

    Args:
        logits: float32 [B, P, V].
        tokens: int32 [B, P].
        num_top: how many of the most likely tokens to return as well.
        wanted: bool scalar; when false nothing is computed and zeros are returned.

    Returns:
        Of the tokens [B, P]; ids and log-probabilities of the most likely [B, P, num_top].
    """
    num_top = min(num_top, logits.shape[-1])

    def compute(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
        top, ids = jax.lax.top_k(logprobs, num_top)
        return chosen, ids.astype(jnp.int32), top

    def skip(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        shape = (*tokens.shape, num_top)
        return jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    return jax.lax.cond(wanted, compute, skip, logits)
