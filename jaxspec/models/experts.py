"""Routed experts: a router chooses a few for each token, and products are grouped by expert.

The experts are the first axis of their weights (behind that of stacked layers), so that they can be split over chips.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import ACTIVATIONS, MLP, Linear, init_weight
from jaxspec.models.parts import ExpertsConfig


class Experts(nnx.Module):
    """A router, routed experts, and where there is one an expert that every token goes to."""

    def __init__(self, config: ModelConfig, *, lead: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs | None):
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        count, size = experts.num_experts, experts.size
        self.gate = init_weight(rngs, (*lead, hidden, count), dtype)
        # Kept in float32: it decides between scores that may be close.
        self.choice_bias = nnx.Param(jnp.zeros((*lead, count), jnp.float32)) if experts.has_bias else None
        self.gate_up_proj = init_weight(rngs, (*lead, count, hidden, 2 * size), dtype)
        self.down_proj = init_weight(rngs, (*lead, count, size, hidden), dtype)
        how: dict[str, Any] = {"lead": lead, "dtype": dtype, "rngs": rngs}
        self.shared_expert = MLP(config, size=experts.shared_size, **how) if experts.shared_size else None
        self.shared_expert_gate = Linear(hidden, 1, bias=False, **how) if experts.gates_shared else None
        self.config, self.activation = experts, config.hidden_act

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        logits = tokens.astype(jnp.float32) @ self.gate[...].astype(jnp.float32)
        bias = None if self.choice_bias is None else self.choice_bias[...]
        chosen, weights = route(logits, bias, self.config)
        out = grouped_mlp(
            tokens, self.gate_up_proj[...], self.down_proj[...], chosen, weights, activation=self.activation
        ).reshape(x.shape)
        if self.shared_expert is None:
            return out
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * shared
        return out + shared


def route(logits: jax.Array, bias: jax.Array | None, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Which experts each token goes to, and with what weight.

    Args:
        logits: float32 [T, X], of every expert.
        bias: float32 [X], added to the scores for the choice only; None is none.
        config: the rule.

    Returns:
        int32 [T, topk] and float32 [T, topk].
    """
    scores = jax.nn.softmax(logits, axis=-1) if config.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if config.num_groups > 1:
        choice = jnp.where(_in_kept_groups(choice, config), choice, -jnp.inf)
    _, chosen = jax.lax.top_k(choice, config.topk)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * config.scale


def _in_kept_groups(choice: jax.Array, config: ExpertsConfig) -> jax.Array:
    """Experts of the groups whose best two scores sum highest: bool [T, X]."""
    groups = choice.reshape(choice.shape[0], config.num_groups, -1)
    best = jnp.sum(jax.lax.top_k(groups, min(2, groups.shape[-1]))[0], axis=-1)
    _, kept = jax.lax.top_k(best, config.topk_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(config.num_groups), axis=1)
    return jnp.repeat(is_kept, groups.shape[-1], axis=1)


def grouped_mlp(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array, weights: jax.Array, *, activation: str
) -> jax.Array:
    """The weighted sum of what each token's experts make of it.

    Args:
        x: [T, E].
        gate_up: [X, E, 2 I], gate and up side by side.
        down: [X, I, E].
        chosen: int32 [T, topk].
        weights: float32 [T, topk].
        activation: of the gate.

    Returns:
        [T, E].
    """
    # XLA makes of a ragged product on the CPU one over all experts, with masks: measured 1.4 to 2.5 times as long as
    # the plain one.
    run = functools.partial(
        jax.lax.platform_dependent,
        cpu=functools.partial(_every_expert, activation=activation),
        default=functools.partial(_by_expert, activation=activation),
    )
    return run(x, gate_up, down, chosen, weights)


def _every_expert(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array, weights: jax.Array, *, activation: str
) -> jax.Array:
    """All experts run all tokens, and most count nothing: for few and small experts."""
    share = jnp.sum(jax.nn.one_hot(chosen, down.shape[0]) * weights[..., None], axis=1).astype(x.dtype)
    gate, up = jnp.split(jnp.einsum("te,xei->txi", x, gate_up), 2, axis=-1)
    made = jnp.einsum("txi,xie->txe", ACTIVATIONS[activation](gate) * up, down)
    return jnp.einsum("txe,tx->te", made, share)


def _by_expert(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: jax.Array, weights: jax.Array, *, activation: str
) -> jax.Array:
    """Tokens sorted by expert, so that each expert has one product with its own."""
    topk = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=down.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // topk], gate_up, sizes), 2, axis=-1)
    made = jax.lax.ragged_dot(ACTIVATIONS[activation](gate) * up, down, sizes)
    back = made[jnp.argsort(order)].reshape(x.shape[0], topk, -1)
    return jnp.einsum("tke,tk->te", back, weights.astype(x.dtype))
