"""Engine settings for a script that knows what it will run, so that little has to be compiled."""

import dataclasses
from collections.abc import Collection

from jaxspec import EngineConfig

SHORT_CHUNK = 128


def fit(engine: EngineConfig, *, rows: int, row_buckets: Collection[int] | None = None) -> EngineConfig:
    """Fills in what the flags left open; what they set stays.

    Args:
        rows: completions decoded together, where neither --max-running-requests nor --decode-row-buckets says.
        row_buckets: batch sizes to compile decoding for; None is the engine's choice.
    """
    largest = max(engine.decode_row_buckets) if engine.decode_row_buckets else rows
    rows, chunk = engine.max_running_requests or largest, engine.chunked_prefill_size
    if chunk is not None and engine.max_model_len is not None:
        chunk = min(chunk, engine.max_model_len)  # no prompt is longer
    row_buckets = engine.decode_row_buckets or (None if row_buckets is None else sorted({*row_buckets, rows}))
    # Two lengths of prefill chunk, not every power of two: a short prompt costs a little more, the start much less.
    if engine.prefill_chunk_buckets is None and chunk is not None and chunk > SHORT_CHUNK:
        buckets = (SHORT_CHUNK, chunk)
        engine = dataclasses.replace(engine, chunked_prefill_size=chunk, prefill_chunk_buckets=buckets)
    return dataclasses.replace(
        engine,
        max_running_requests=rows,
        decode_row_buckets=row_buckets,
    )
