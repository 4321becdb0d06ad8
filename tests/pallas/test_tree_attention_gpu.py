"""The kernel for Hopper GPUs against its twin, in JAX's interpreter for GPUs; what is no committed token is NaN.

The interpreter has neither layouts of registers nor transposed operands of the tensor cores, so these are stood in for:
what is tested is the walk, the copies and their barriers, the masks and the softmax. `test_aot` lowers the real thing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.attention import Scoring
from jaxspec.pallas import tree_attention_warpgroup
from jaxspec.pallas.specs import TOLERANCE, Heads, Spec

# Not public yet, and so not there in every version.
interpreter: Any = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason="no interpreter for GPUs")

HEADS = Heads(8, 2, 64)


def product(left: Any, right: Any, *, transpose: bool) -> jax.Array:
    return jnp.dot(left[...], right[...].T if transpose else right[...], preferred_element_type=jnp.float32)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    monkeypatch.setattr(plgpu, "layout_cast", lambda array, layout: array)
    monkeypatch.setattr(plgpu, "load", lambda ref, index, **how: ref[...])
    iota = jax.lax.broadcasted_iota
    monkeypatch.setattr(plgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: iota(dtype, shape, axis))
    monkeypatch.setattr(tree_attention_warpgroup, "_product", product)


# Lengths: no token, one, the last slot of a page, a full page, one more; two parts of queries, and two of own keys.
@pytest.mark.parametrize(
    "spec",
    [
        Spec(HEADS, (0, 1, 63, 64, 65), 1, 0),
        Spec(HEADS, (0, 130), 20, 0, page_size=128),
        Spec(HEADS, (70, 0), 6, 3, num_earlier=30),
        Spec(Heads(2, 2, 48), (5, 0), 70, 4),
        Spec(Heads(2, 2, 64), (5, 0), 70, 0),
    ],
    ids=["plain", "chain", "tree", "long tree", "long chain"],
)
def test_the_walk_equals_the_twin(spec):
    check(spec)


# Within the block, into the prefix, and past its first step.
@pytest.mark.parametrize("window", [2, 5, 100])
@pytest.mark.parametrize("form", [(6, 0), (6, 3)], ids=["causal", "tree"])
def test_windows_caps_and_sinks_equal_the_twin(form, window):
    sinks = jnp.linspace(-2.0, 3.0, HEADS.num_heads)
    check(Spec(HEADS, (0, 64, 190), *form), scoring=Scoring(window=window, soft_cap=2.0), sinks=sinks)


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=100, soft_cap=2.0)], ids=["plain", "windowed"])
def test_a_prefix_alone_has_the_sums_of_the_twin(scoring):
    inputs = Spec(HEADS, (0, 64, 190), 6, 3).inputs("bfloat16")
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams()):
        found = inputs.prefix("pallas_gpu", scoring)
    expected = inputs.prefix("xla", scoring)
    # The weights of the twin are relative to its own step's peak when they are rounded to bfloat16.
    np.testing.assert_allclose(found.peak, expected.peak, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.mass, expected.mass, rtol=1e-5)
    seen = np.asarray(expected.mass) > 0
    means = [np.asarray(part.values / part.mass[..., None])[seen] for part in (found, expected)]
    np.testing.assert_allclose(*means, atol=TOLERANCE["bfloat16"], rtol=0)
    assert not np.asarray(found.values)[~seen].any()


@pytest.mark.parametrize("what", ["attend", "prefix"])
def test_windows_caps_and_sinks_lower(what, monkeypatch):
    """The real thing, without the stand-ins."""
    monkeypatch.undo()
    inputs = Spec(HEADS, (0, 64), 6, 3).inputs("bfloat16")
    how = {"scoring": Scoring(window=5, soft_cap=2.0), **({"sinks": jnp.zeros(8)} if what == "attend" else {})}
    traced = jax.jit(lambda inputs: getattr(inputs, what)("pallas_gpu", **how)).trace(inputs)
    assert "tree_attention_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def check(spec: Spec, **how: Any) -> None:
    inputs = spec.inputs("bfloat16")
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams()):
        found = np.asarray(inputs.attend("pallas_gpu", **how), np.float32)
    expected = np.asarray(inputs.attend("xla", **how), np.float32)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE["bfloat16"], rtol=0)


def test_latent_attention_is_refused():
    with pytest.raises(NotImplementedError, match="no latent attention: sums of 64 x 512"):
        Spec(Heads(2, 1, 576, 512), (5,), 2, 0).inputs("bfloat16").attend("pallas_gpu")
