"""Kernels of attention against their twin, in the interpreter; whatever is no committed token is NaN."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxspec.attention import Scoring, join
from jaxspec.pallas import tree_attention_tpu
from jaxspec.pallas.specs import TOLERANCE, Heads, Inputs, Spec

HEADS = Heads(4, 2, 8)


def interpreted(inputs: Inputs, mode: Any = "on_wait", **how) -> np.ndarray:
    """What the kernel for TPUs makes of it."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", dma_execution_mode=mode)):
        return np.asarray(inputs.attend("pallas_tpu", **how), np.float32)


def twin(inputs: Inputs, **how) -> np.ndarray:
    """What XLA makes of it."""
    return np.asarray(inputs.attend("xla", **how), np.float32)


def check(spec: Spec, dtype: str = "float32", **how) -> None:
    inputs = spec.inputs(dtype)
    np.testing.assert_allclose(interpreted(inputs, **how), twin(inputs, **how), atol=TOLERANCE[dtype], rtol=0)


# No token, one, the last slot of a page, a full page, one more, the end of a step of the walk and around it.
LENGTHS = (0, 1, 15, 16, 17, 255, 256, 257, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [(1, 0), (3, 0), (5, 1), (6, 3)], ids=["plain", "chain", "chain of bits", "tree"])
def test_ragged_prefixes_equal_the_twin(form, dtype):
    check(Spec(HEADS, LENGTHS, *form, page_size=16), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_of_64_nodes_equal_the_twin(dtype):
    check(Spec(HEADS, (0, 40, 300), 64, 10, page_size=16), dtype)


@pytest.mark.parametrize("page_size", [8, 64, 512])
def test_pages_of_any_size_equal_the_twin(page_size):
    check(Spec(HEADS, (page_size - 1, page_size, page_size + 1, 0), 4, 2, page_size=page_size))


@pytest.mark.parametrize("heads", [Heads(3, 3, 8), Heads(9, 3, 64), Heads(8, 1, 128)])
def test_any_heads_equal_the_twin(heads):
    check(Spec(heads, (5, 0, 40), 4, 2, page_size=16))


@pytest.mark.parametrize("num_earlier", [1, 30, 40])
def test_earlier_nodes_come_before_the_blocks_own(num_earlier):
    check(Spec(HEADS, (0, 20), 4, 3, page_size=16, num_earlier=num_earlier))


@pytest.mark.parametrize("form", [(40, 0), (40, 4)], ids=["causal", "tree"])
def test_a_long_block_is_computed_in_parts(form, monkeypatch):
    """Each walks the prefix anew, and the last one is not full."""
    monkeypatch.setattr(tree_attention_tpu, "MAX_PROGRAM_ROWS", 32)
    check(Spec(HEADS, (300, 0, 17), *form, page_size=16))


@pytest.mark.parametrize("form", [(70, 0), (70, 4)], ids=["causal", "tree"])
def test_a_long_block_is_fetched_in_steps(form, monkeypatch):
    """Three of them, and the last one is not full."""
    monkeypatch.setattr(tree_attention_tpu, "STEP_LEN", 32)
    check(Spec(HEADS, (50, 0, 32), *form, page_size=16, num_earlier=10 if form[1] else 0))


# Smaller than the tree, of its size, within the first step of the walk, and beyond it.
@pytest.mark.parametrize("window", [1, 2, 5, 100, 270])
@pytest.mark.parametrize("form", [(6, 0), (6, 3)], ids=["causal", "tree"])
def test_windows_equal_the_twin(form, window):
    check(Spec(HEADS, (*LENGTHS, 520), *form, page_size=16), scoring=Scoring(window=window))


def test_soft_caps_and_sinks_equal_the_twin():
    sinks = jnp.array([-2.0, 0.0, 1.0, 30.0])
    check(Spec(HEADS, (0, 40, 300), 6, 3, page_size=16), scoring=Scoring(soft_cap=2.0), sinks=sinks)
    check(Spec(HEADS, (0, 40, 300), 6, 0, page_size=16), scoring=Scoring(window=7, soft_cap=2.0), sinks=sinks)


# Values of whole vectors and of a part of one, as of DeepSeek-V3's 512 of 576.
@pytest.mark.parametrize("heads", [Heads(8, 1, 160, 128), Heads(4, 2, 24, 16)], ids=["whole", "part"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [(3, 0), (6, 3)], ids=["chain", "tree"])
def test_values_may_be_a_part_of_the_keys(form, heads, dtype):
    check(Spec(heads, LENGTHS, *form, page_size=16), dtype)


@pytest.mark.parametrize("heads", [HEADS, Heads(8, 1, 160, 128)], ids=["keys and values", "latent"])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=100, soft_cap=2.0)], ids=["plain", "windowed"])
def test_a_prefix_alone_has_the_sums_of_the_twin(heads, scoring):
    inputs = Spec(heads, (*LENGTHS, 520), 6, 3, page_size=16).inputs("float32")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        found = inputs.prefix("pallas_tpu", scoring)
    for ours, theirs in zip(found, inputs.prefix("xla", scoring)):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE["float32"], rtol=TOLERANCE["float32"])


def test_parts_of_a_prefix_are_joined_by_their_log_sum_exp():
    """As on chips that hold a part of the context each: 10 pages here, and what is left there."""
    inputs = Spec(HEADS, (0, 100, 160, 161, 300), 6, 3, page_size=16).inputs("float32")
    block, length = inputs.block, inputs.block.prefix_len
    near = block._replace(prefix_len=jnp.minimum(length, 160), table=block.table[:, :10])
    far = block._replace(prefix_len=jnp.maximum(length - 160, 0), table=block.table[:, 10:])
    with pltpu.force_tpu_interpret_mode():
        both = join(*(inputs._replace(block=part).prefix("pallas_tpu") for part in (near, far)))
    whole = inputs.prefix("xla")
    seen = np.asarray(whole.mass) > 0
    for part in (both, whole):
        assert (np.asarray(part.mass) > 0).tolist() == seen.tolist()
    sums = [np.asarray(part.peak + jnp.log(part.mass))[seen] for part in (both, whole)]
    np.testing.assert_allclose(*sums, atol=2e-5, rtol=0)
    means = [np.asarray(part.values / part.mass[..., None])[seen] for part in (both, whole)]
    np.testing.assert_allclose(*means, atol=2e-5, rtol=0)


def test_a_batch_without_any_prefix_fetches_nothing():
    check(Spec(HEADS, (0, 0, 0), 4, 2, page_size=16))


def test_rows_of_garbage_do_not_touch_others():
    inputs = Spec(HEADS, (0, 40, 300, 0), 6, 3, page_size=16).inputs("float32")
    expected = twin(inputs)
    given: Any = inputs[:3]
    queries, keys, values = (array.at[np.array([0, 3])].set(np.nan) for array in given)
    spoiled = inputs._replace(queries=queries, keys=keys, values=values)
    np.testing.assert_allclose(interpreted(spoiled)[1:3], expected[1:3], atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_copies_may_run_as_early_or_as_late_as_they_can(mode):
    """Early ones must not overwrite what is still read, and late ones must be waited for."""
    inputs = Spec(HEADS, (600, 0, 300), 3, 0, page_size=16).inputs("float32")
    np.testing.assert_allclose(interpreted(inputs, mode=mode), twin(inputs), atol=2e-5, rtol=0)
