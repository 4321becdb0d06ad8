"""v1 and v2 are one program; they differ in when the host reads what it dispatched."""

import numpy as np
import pytest

from jaxspec.config import SamplingParams
from jaxspec.draft.ngram import Ngram
from jaxspec.engine import Engine
from tests.tiny import VOCAB, chain, make_engine, requests_of, tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
ONE_OF_EACH = {"num_rows": 2, "decode_row_buckets": (2,), "prefill_chunk_buckets": (64,), "chunked_prefill_size": 64}


def _prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, 20).tolist() for _ in range(count)]


class _Watched:
    """A verdict that tells when it is read."""

    def __init__(self, verdict, name: str, log: list[str]):
        self._verdict, self._name, self._log = verdict, name, log

    def __getattr__(self, field: str):
        if field == "tokens":
            self._log.append(f"read {self._name}")
        return getattr(self._verdict, field)


def _log_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs two requests and returns the dispatches and reads of decode rounds, in order."""
    log: list[str] = []
    decode = engine.runner.decode

    def watched(row_ids, table):
        name = f"round {sum(entry.startswith('dispatch') for entry in log)}"
        log.append(f"dispatch {name}")
        return _Watched(decode(row_ids, table), name, log)

    monkeypatch.setattr(engine.runner, "decode", watched)
    for request in requests_of(_prompts(2), PARAMS):
        engine.add(request)
    while engine.has_work:
        engine.step()
    return log


@pytest.mark.parametrize("rounds_in_flight", [0, 1])
def test_a_round_is_read_before_the_next_is_dispatched_in_v1_and_after_it_in_v2(rounds_in_flight, monkeypatch):
    engine = make_engine(tiny_model(1), Ngram(chain(3), 1, 3), rounds_in_flight=rounds_in_flight, **ONE_OF_EACH)
    log = _log_of(engine, monkeypatch)
    num_rounds = sum(entry.startswith("dispatch") for entry in log)
    expected = []
    for number in range(num_rounds):
        expected.append(f"dispatch round {number}")
        if number >= rounds_in_flight:
            expected.append(f"read round {number - rounds_in_flight}")
    if rounds_in_flight:
        expected.append(f"read round {num_rounds - 1}")
    assert num_rounds > 10
    assert log == expected
