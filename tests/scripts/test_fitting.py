"""`scripts/fitting.py`: it fills in what is open, and nothing else."""

import pytest

from fitting import fit
from jaxspec import EngineConfig
from tests.plans import plan_of


def test_open_settings_fit_the_rows():
    engine = fit(EngineConfig(), rows=4, row_buckets=(4, 1))
    assert engine.max_running_requests == 4
    assert engine.decode_row_buckets == (1, 4)
    assert engine.prefill_chunk_buckets == (128, 512)


@pytest.mark.parametrize("context", [2, 64, 127, 128, 129, 300, 512, 4096])
@pytest.mark.parametrize("chunk", [None, 64, 512, 2048])
def test_prefill_fits_the_context(context, chunk):
    engine = fit(EngineConfig(max_model_len=context, chunked_prefill_size=chunk), rows=1)
    plan = plan_of(engine=engine)
    expected = plan_of(engine=EngineConfig(max_model_len=context, chunked_prefill_size=chunk))
    assert plan.chunked_prefill_size == expected.chunked_prefill_size == plan.prefill_chunk_buckets[-1]


def test_rows_that_are_set_are_a_bucket_too():
    assert fit(EngineConfig(max_running_requests=8), rows=4, row_buckets=(1, 4)).decode_row_buckets == (1, 4, 8)


def test_row_buckets_that_are_set_say_the_rows():
    engine = fit(EngineConfig(decode_row_buckets=(1, 2)), rows=4)
    assert (engine.max_running_requests, engine.decode_row_buckets) == (2, (1, 2))


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(max_running_requests=3, decode_row_buckets=(2, 3), prefill_chunk_buckets=(64, 512)),
        EngineConfig(max_running_requests=3, decode_row_buckets=(3,), chunked_prefill_size=64),
        EngineConfig(max_running_requests=3, decode_row_buckets=(3,), chunked_prefill_size=None),
    ],
)
def test_settings_that_are_set_stay(engine):
    assert fit(engine, rows=1, row_buckets=(1,)) == engine
