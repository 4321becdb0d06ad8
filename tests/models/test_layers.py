"""Layers against their formulas, written out in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.models.config import RopeConfig
from jaxspec.models.layers import MLP, Linear, RMSNorm, rope_frequencies, rotary_angles, rotate
from tests.tiny import tiny_config

DIM = 64


def direct_frequency(rope: RopeConfig, index: int) -> float:
    """One inverse frequency, by the words of the papers."""
    plain = rope.theta ** (-2 * index / DIM)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    context = rope.original_max_position
    assert context is not None
    turns = context * plain / (2 * math.pi)  # over the context that the model was trained on
    if rope.kind == "llama3":
        if turns < rope.low_freq_factor:
            return plain / rope.factor
        if turns > rope.high_freq_factor:
            return plain
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return kept * plain + (1 - kept) * plain / rope.factor

    def dimension_with(rotations: float) -> float:
        """Where a frequency makes so many turns: context theta^(-2 i / dim) = 2 pi rotations, solved for i."""
        return DIM * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

    first, last = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, DIM - 1)
    divided = min(max((index - first) / (last - first), 0.0), 1.0)
    return divided * plain / rope.factor + (1 - divided) * plain


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=10000.0),
        RopeConfig(theta=1e6, kind="linear", factor=4.0),
        RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192),
        RopeConfig(kind="llama3", factor=32.0, original_max_position=64, low_freq_factor=2.0, high_freq_factor=3.0),
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=32768),
        RopeConfig(kind="yarn", factor=40.0, original_max_position=4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
        RopeConfig(theta=150000.0, kind="yarn", factor=32.0, original_max_position=4096, truncate=False),
    ],
)
def test_frequencies_follow_the_formula(rope):
    expected = [direct_frequency(rope, index) for index in range(DIM // 2)]
    frequencies = rope_frequencies(rope, DIM)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, expected, rtol=1e-5)


def test_a_factor_of_one_changes_nothing():
    plain = rope_frequencies(RopeConfig(), DIM)
    for kind in ("linear", "llama3", "yarn"):
        original = None if kind == "linear" else 256
        scaled = rope_frequencies(RopeConfig(kind=kind, factor=1.0, original_max_position=original), DIM)
        np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_yarn_scales_cos_and_sin():
    base = {"kind": "yarn", "factor": 4.0, "original_max_position": 128}
    positions = jnp.zeros((1, 1), jnp.int32)  # where cos is 1
    for rope, expected in (
        (RopeConfig(**base), 0.1 * math.log(4) + 1),
        (RopeConfig(**base, attention_factor=1.5), 1.5),
        (RopeConfig(**base, mscale=1.0, mscale_all_dim=1.0), 1.0),
        (RopeConfig(**base, mscale=0.7, mscale_all_dim=0.4), (0.07 * math.log(4) + 1) / (0.04 * math.log(4) + 1)),
    ):
        cos, sin = rotary_angles(rope, DIM, positions)
        np.testing.assert_allclose(cos, expected, rtol=1e-6)
        np.testing.assert_array_equal(sin, 0)


def test_rotation_turns_pairs_half_a_head_apart_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, DIM)).astype(np.float32)
    positions = rng.integers(0, 500, (2, 5))
    rope = RopeConfig()
    turned = rotate(jnp.asarray(x), rotary_angles(rope, DIM, jnp.asarray(positions)))
    numbers = x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]
    numbers = numbers * np.exp(1j * positions[..., None, None] * rope_frequencies(rope, DIM).astype(np.float64))
    expected = np.concatenate([numbers.real, numbers.imag], axis=-1)
    np.testing.assert_allclose(turned, expected, atol=1e-4)  # angles up to 500 in float32


def test_products_of_rotated_vectors_depend_on_their_distance_alone():
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, DIM)), jnp.float32) for _ in range(2))

    def product(at: int, distance: int) -> float:
        angles = [rotary_angles(RopeConfig(), DIM, jnp.array([[place]])) for place in (at + distance, at)]
        return float(jnp.sum(rotate(query, angles[0]) * rotate(key, angles[1])))

    for distance in (0, 1, 17):
        assert product(3, distance) == pytest.approx(product(200, distance), abs=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm_weighs_the_rounded_quotient(dtype):
    """The statistic is float32 in any dtype; the quotient is rounded before it is weighed."""
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.standard_normal(shape) * 7, dtype) for shape in ((3, 32), 32))
    norm = RMSNorm(32, eps=1e-3, dtype=jnp.dtype(dtype))
    norm.weight[...] = weight
    wide = np.asarray(x, np.float64)
    quotient = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3), dtype)
    assert norm(x).dtype == dtype
    np.testing.assert_allclose(norm(x).astype(np.float32), (quotient * weight).astype(np.float32), rtol=1e-5)


def test_linear_adds_its_bias_and_stacks_behind_lead():
    layer = Linear(4, 3, bias=True, lead=(2,), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    assert layer.bias is not None
    assert (layer.weight.shape, layer.bias.shape) == ((2, 4, 3), (2, 3))
    one = Linear(4, 3, bias=True, lead=(), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    assert one.bias is not None
    one.bias[...] = jnp.array([1.0, 2.0, 3.0])
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_allclose(one(jnp.asarray(x)), x @ np.asarray(one.weight[...]) + [1, 2, 3], rtol=1e-6)


def test_without_random_numbers_weights_are_zeros():
    layer = Linear(4, 3, bias=False, lead=(), dtype=jnp.dtype("bfloat16"), rngs=None)
    np.testing.assert_array_equal(layer.weight[...], jnp.zeros((4, 3), jnp.bfloat16))
    assert layer.bias is None


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_mlp_gates_by_silu(mlp_bias):
    config = tiny_config(mlp_bias=mlp_bias)
    mlp = MLP(config, lead=(), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    parts = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = getattr(mlp, name)
        weight = rng.standard_normal(layer.weight.shape).astype(np.float32) / 5
        bias = rng.standard_normal(layer.weight.shape[1]).astype(np.float32) * mlp_bias
        layer.weight[...] = jnp.asarray(weight)
        if mlp_bias:
            layer.bias[...] = jnp.asarray(bias)
        parts[name] = lambda x, weight=weight, bias=bias: x @ weight.astype(np.float64) + bias
    x = rng.standard_normal((2, 3, config.hidden_size))
    gate = parts["gate_proj"](x)
    expected = parts["down_proj"](gate / (1 + np.exp(-gate)) * parts["up_proj"](x))
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), expected, rtol=1e-3, atol=1e-4)
