"""Prompts that begin alike: computed once, with the same outputs and the same drafts."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.draft.feature import Feature
from jaxspec.engine import Engine
from jaxspec.models.delta_cache import DeltaCache
from jaxspec.pages import PagePool
from jaxspec.prefix import extend_names
from jaxspec.request import Request
from tests.cases import MAX_LEN, NUM_STEPS, SCHEDULES, engine_of, random_head, target
from tests.families import CONFIGS, family_model
from tests.simulated_device import (
    VOCAB,
    SimulatedEngine,
    make_limits,
    make_request,
    make_scheduler,
    prefilled,
    random_requests,
    take_prefill,
)
from tests.test_schedules import check_against_plain, check_counts
from tests.tiny import HAS_PANELS, chain, engine_over, make_runner, requests_of, run


def test_a_name_covers_all_tokens_before_and_one_more():
    def names_of(tokens: list[int]) -> list[bytes]:
        names: list[bytes] = []
        extend_names(names, tokens, 4)
        return names

    tokens = list(range(13))
    names = names_of(tokens)
    assert len(set(names)) == 3
    assert [len(names_of(tokens[:length])) for length in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    for place, same in {0: 0, 3: 0, 4: 0, 5: 1, 8: 1, 9: 2, 12: 2}.items():
        other = [*tokens[:place], 99, *tokens[place + 1 :]]
        assert [a == b for a, b in zip(names, names_of(other))] == [page < same for page in range(3)], place
    grown = names_of(tokens[:9])
    extend_names(grown, tokens, 4)
    assert grown == names


def alike(rng: random.Random, count: int, max_len: int) -> list[Request]:
    """Requests of which most begin like another, some up to a page's last token."""
    base = [rng.randrange(VOCAB) for _ in range(max_len)]
    requests = random_requests(rng, count, max_len)
    for request in requests:
        if rng.random() < 0.8:
            shared = min(rng.choice([4, 8, 16, rng.randint(1, 40)]), max_len - request.budget - 1)
            room = max_len - request.budget - shared
            request.prompt_ids = base[:shared] + request.prompt_ids[:room]
    return requests


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rounds", [1, 4])
def test_shared_pages_hold_what_each_request_would_have_computed(page_size, rounds):
    """At random times, with preemption, aborts, ends by the host and a pool that is too small to keep much."""
    rng = random.Random(10 * page_size + rounds)
    limits = make_limits(rounds_per_dispatch=rounds, prefix_caching=True)
    pool = PagePool(112 // page_size, page_size)
    engine = SimulatedEngine(
        limits, pool, accept=lambda: rng.randint(0, limits.path_len - 1), lag=lambda: rng.choice([0, 1, 1, 3])
    )
    requests = alike(rng, 300, max_len=90)
    host_stops = {r.id: rng.randint(1, r.budget) for r in requests if rng.random() < 0.2}
    coming = list(reversed(requests))
    while coming or engine.scheduler.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if coming:
                engine.scheduler.add(coming.pop())
        if rng.random() < 0.05:
            engine.scheduler.abort(rng.choice(requests).id)
        if rng.random() < 0.05 and engine.scheduler.num_running:
            engine.scheduler._preempt(engine.scheduler._running[-1])
        for progress in engine.step():
            request, keep = progress.request, host_stops.get(progress.request.id)
            if keep is not None and len(request.output_ids) >= keep:
                engine.scheduler.finish(request, "stop", keep=keep, stop_reason="END")
    for request in requests:
        check_counts(request)
        if request.finish_reason != "abort" and request.stop_reason != "END":
            check_against_plain(request)
    metrics = engine.scheduler.metrics
    assert metrics.preemptions > 0
    assert metrics.reused_tokens > 250
    assert pool.num_free == pool.num_pages
    assert 0 < pool.num_kept <= pool.num_pages


def test_a_prefix_that_many_share_is_computed_once():
    """Those that come together wait for the one that computes it, be it in several chunks."""
    scheduler = make_scheduler(prefix_caching=True, max_chunk=8, chunk_buckets=(4, 8), prefill_rows=2)
    shots = list(range(19))
    for name in "abcd":
        scheduler.add(make_request(name, [*shots, ord(name)], 4))
    planned = []
    while (batch := scheduler.plan_prefill()) is not None:
        planned.append([(chunk.request.id, chunk.start, len(chunk.tokens)) for chunk in batch.chunks])
        assert all(chunk.adopted == shots[: chunk.start] for chunk in batch.chunks if chunk.request.id != "a")
    # b could go on from a's first pages at once, and would compute the next ones itself.
    assert planned == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4), ("b", 16, 4)], [("c", 16, 4), ("d", 16, 4)]]
    assert scheduler.metrics.reused_tokens == 3 * 16


def test_prefixes_are_not_looked_for_where_that_is_off():
    scheduler = make_scheduler(prefix_caching=False)
    for name in ("a", "b"):
        request = make_request(name, [1] * 9, 4)
        prefilled(scheduler, request)
        scheduler.abort(name)
    assert scheduler.metrics.reused_tokens == scheduler.pool.num_kept == 0
    assert scheduler.metrics.prefilled_tokens == 18


def test_a_preempted_request_goes_on_from_its_own_pages():
    scheduler = make_scheduler(prefix_caching=True, page_size=4)
    request = make_request("r", [1, 2, 3, 4, 5, 6], 10)
    prefilled(scheduler, request, token=7)
    scheduler._preempt(request)
    (chunk,) = take_prefill(scheduler).chunks
    assert (chunk.start, chunk.adopted, chunk.tokens) == (4, [1, 2, 3, 4], [5, 6, 7])
    assert scheduler.metrics.prefilled_tokens == 9


SHARED = tuple(np.random.default_rng(3).integers(0, 64, 48).tolist())
# Two that part at the end of a page of 16, where a head's last pair depends on what follows; one that goes on from 48.
PROMPTS = [
    (*SHARED[:32], 1, 2, 3),
    (*SHARED[:32], 9, 2, 3),
    (*SHARED, 5),
    SHARED[:40],
    (*SHARED, 7, 7),
    SHARED[:33],
    (*SHARED[:32], 1, 2, 3),
]
DRAFTS = ("ngram", "identical", "good", "eagle3-3-2-6", "sure-5-4-8", "eagle3-ngram")


def outputs_of(draft: str, schedule: str, *, caching: bool, chunk: int | None = None, page_size: int = 16):
    """What the prompts give, first all in one crowd and then once more, when their pages are there."""
    engine = engine_of(draft, schedule, page_size=page_size, chunk=chunk)
    engine._scheduler._prefixes._is_on = caching
    params = [
        SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=20, min_tokens=20)
        for index in range(len(PROMPTS))
    ]
    seen: list[Request] = []
    for wave in range(2):
        made = requests_of([list(prompt) for prompt in PROMPTS], params, max_model_len=MAX_LEN)
        for request in made:
            request.id = f"{wave}/{request.id}"
        seen += run(engine, made)
    assert engine.num_free_pages == engine.plan.num_pages
    return engine.metrics, [request.output_ids for request in seen], [request.emissions for request in seen]


@pytest.mark.parametrize("draft", ["plain", *DRAFTS])
@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_outputs_and_drafts_are_those_of_computing_all_anew(draft, schedule):
    page_size = 1 if "-" in draft else 16  # as in the equality matrix, which has compiled these
    off, tokens, emissions = outputs_of(draft, schedule, caching=False, page_size=page_size)
    on, shared_tokens, shared_emissions = outputs_of(draft, schedule, caching=True, page_size=page_size)
    assert shared_tokens == tokens
    assert shared_emissions == emissions
    assert off.reused_tokens == 0
    assert on.reused_tokens > 0.6 * off.prefilled_tokens
    assert on.prefilled_tokens + on.reused_tokens == off.prefilled_tokens


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_go_on_from_shared_pages(schedule):
    _, tokens, emissions = outputs_of("good", schedule, caching=False)
    metrics, shared_tokens, shared_emissions = outputs_of("good", schedule, caching=True, chunk=7)
    assert (shared_tokens, shared_emissions) == (tokens, emissions)
    assert metrics.reused_tokens > 300


@pytest.mark.skipif(not HAS_PANELS, reason="XLA's attention sums a chunk and what is before it apart")
def test_a_page_is_the_same_bit_for_bit_however_its_prompt_was_cut():
    """In the target's pool and in the head's: whole or in chunks, alone or beside another prompt."""
    head, leaves = random_head("eagle3")
    runner = make_runner(target(), Feature(head, chain(NUM_STEPS)), leaves, num_pages=24, max_model_len=MAX_LEN)
    prompt = np.random.default_rng(1).integers(0, 64, 70).tolist()
    pools = []
    for chunk, buckets in ((None, (MAX_LEN,)), (16, (16, MAX_LEN)), (7, (16, MAX_LEN)), (64, (64, MAX_LEN))):
        for prompts in ([prompt], [prompt, prompt[::-1]]):
            engine = engine_over(runner, chunked_prefill_size=chunk, prefill_chunk_buckets=buckets)
            run(engine, requests_of(prompts, SamplingParams(temperature=0, max_tokens=1), max_model_len=MAX_LEN))
            caches = runner.state.caches, runner.state.draft.caches
            pools.append([np.asarray(leaf)[:, :4] for leaf in jax.tree.leaves(caches)])
    assert len(pools[0]) == 4
    for others in pools[1:]:
        for leaf, expected in zip(others, pools[0], strict=True):
            np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_that_keeps_more_of_a_prompt_than_its_pages_shares_none(family):
    """A recurrent state is not in pages: a row that began behind a shared prefix would have none."""
    runner = make_runner(family_model(family), num_rows=2, num_pages=8)
    is_recurrent = any(isinstance(cache, DeltaCache) for cache in runner.state.caches)
    assert runner.keeps_all_in_pages != is_recurrent
    engine = engine_over(runner)
    assert engine.plan.prefix_caching != is_recurrent
    if is_recurrent:
        with pytest.raises(ValueError, match="this model keeps more than those; set it to False"):
            Engine(runner, dataclasses.replace(engine.plan, prefix_caching=True), EngineConfig())
