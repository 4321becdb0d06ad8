"""Weights of fewer bits: another model, and for it speculation is as exact as for any."""

import functools

import jax
import pytest

from jaxspec.cpu.register import why_not
from tests.cases import DEVICE_TOKENS, MAX_LEN, NUM_ROWS, cases, draft_of, plain, play, target
from tests.tiny import HAS_PANELS, engine_over, make_runner

pytestmark = pytest.mark.skipif(not HAS_PANELS, reason=f"needs the CPU's kernels: {why_not() or jax.default_backend()}")


@functools.cache
def outputs(draft: str) -> list[list[int]]:
    """Of the cases, greedy and sampled ones, with int8 weights: those of all bits are multiplied by one kernel."""
    runner = make_runner(
        target(),
        *draft_of(draft),
        num_rows=NUM_ROWS,
        num_pages=DEVICE_TOKENS // 16,
        max_model_len=MAX_LEN,
        weight_dtype="int8",
    )
    engine = engine_over(
        runner, chunked_prefill_size=None, prefill_chunk_buckets=(MAX_LEN,), decode_row_buckets=(NUM_ROWS,)
    )
    return [request.output_ids for request in play(engine, cases())]


@pytest.mark.parametrize("draft", ["good", "eagle3-5-4-8"])
def test_speculative_output_equals_plain_output(draft):
    assert outputs(draft) == outputs("plain")


def test_it_is_another_model_than_float32():
    assert outputs("plain") != [request.output_ids for request in plain()]
