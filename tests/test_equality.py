"""The equality matrix: whatever drafts, and however it is scheduled, the tokens are those of plain decoding.

Drafts x schedules x page sizes x whole and chunked prompts; in each, requests alone, greedy and sampled ones together
and apart, in three rows, with mixed lengths, budgets, stop tokens and min_tokens, undisturbed and preempted.
"""

import functools

import numpy as np
import pytest

from jaxspec.engine import Engine
from jaxspec.metrics import Emission, RoundStats
from jaxspec.request import Request
from tests.cases import (
    DRAFTS,
    SCHEDULES,
    SCRIPT,
    SCRIPTED,
    Case,
    cases,
    engine_of,
    follow,
    plain,
    play,
    target,
    truth,
)
from tests.dense import dense_logits
from tests.scripted import expected_emissions

PAGE_SIZES = (1, 16, 64)
# Where the scheduler has so many pages, long neighbours take them from each other.
SMALL_POOL = {1: 110, 16: 7, 64: 3}
CHUNK = 7  # no multiple of it is a multiple of a page
GREEDY = [index for index in range(16) if index % 2 == 0]


def engine_for(draft: str, schedule: str, page_size: int = 16, chunk: int | None = None, small: bool = False) -> Engine:
    pool_pages = SMALL_POOL[page_size] if small else None
    engine = engine_of(draft, schedule, page_size=page_size, chunk=chunk, pool_pages=pool_pages)
    if draft in SCRIPTED:
        follow(engine, truth(), SCRIPT)
    return engine


def check(requests: list[Request], indices: list[int]) -> None:
    for index, request in zip(indices, requests, strict=True):
        expected = plain()[index]
        where = f"case {index}, {cases()[index]}"
        assert request.output_ids == expected.output_ids, where
        assert (request.finish_reason, request.stop_reason) == (expected.finish_reason, expected.stop_reason), where


@functools.cache
def pace(draft: str) -> tuple[list[Emission], ...]:
    """What each round of each case emits, accepts and proposes: by the script, or else as measured once, in v1."""
    if draft in SCRIPTED:
        return tuple(expected_emissions(SCRIPTED[draft], SCRIPT, request) for request in plain())
    return tuple(request.emissions for request in play(engine_for(draft, "v1"), cases()))


def chosen(indices: list[int]) -> list[Case]:
    return [cases()[index] for index in indices]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", [None, CHUNK], ids=["whole", "chunked"])
class TestMatrix:
    """Every draft in every schedule, page size and prefill."""

    @pytest.mark.parametrize("index", [3, 6, 9, 15])
    def test_alone(self, draft, page_size, schedule, chunk, index):
        requests = play(engine_for(draft, schedule, page_size, chunk), chosen([index]))
        check(requests, [index])
        assert requests[0].emissions == pace(draft)[index]

    @pytest.mark.parametrize("law", ["greedy", "sampled"])
    def test_in_three_rows(self, draft, page_size, schedule, chunk, law):
        indices = [index for index, case in enumerate(cases()) if (case.params.temperature == 0) == (law == "greedy")]
        assert len(indices) == 8
        engine = engine_for(draft, schedule, page_size, chunk)
        requests = play(engine, chosen(indices))
        check(requests, indices)
        assert engine.metrics.preemptions == 0
        assert [request.emissions for request in requests] == [pace(draft)[index] for index in indices]

    def test_mixed_and_preempted(self, draft, page_size, schedule, chunk):
        indices = list(range(16))
        engine = engine_for(draft, schedule, page_size, chunk, small=True)
        check(play(engine, chosen(indices)), indices)
        assert engine.metrics.preemptions > 0
        assert engine.num_free_pages == SMALL_POOL[page_size]
