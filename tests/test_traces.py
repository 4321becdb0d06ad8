"""Nothing is traced or compiled after warm-up, and nothing leaks."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import jaxspec.state
from jaxspec.config import SamplingParams
from jaxspec.draft.feature import Feature
from jaxspec.draft.grow import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.engine import Engine
from jaxspec.launch import warm_up
from jaxspec.metrics import RoundStats
from jaxspec.request import Request
from tests.cases import MAX_LEN, NUM_STEPS, SCHEDULES, engine_of, nearly, random_head, target
from tests.features import mixture
from tests.processors import PROCESSORS
from tests.tiny import VOCAB, chain, engine_over, make_runner, requests_of

LONGEST = 80  # most output tokens of a request
TRACED, COMPILED = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compile_events() -> Iterator[list[str]]:
    """What JAX traces and compiles meanwhile."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in (TRACED, COMPILED):
            seen.append(f"{event} {kwargs}")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def random_adjustments(rng: random.Random) -> dict[str, Any]:
    """What is done to the logits, for four requests in ten."""
    return mixture(rng) if rng.random() < 0.4 else {"stop_token_ids": rng.sample(range(VOCAB), rng.choice([0, 1, 8]))}


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of what a request may ask for."""
    budget = rng.choice([0, 1, 2, rng.randint(1, 40), rng.randint(60, LONGEST)])
    adjustments = random_adjustments(rng)
    adjustments["min_tokens"] = rng.choice([0, 0, rng.randint(0, budget)])
    return SamplingParams(
        **adjustments,
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
        top_k=rng.choice([-1, 1, 5, 1000]),
        top_p=rng.choice([1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.choice([None, rng.getrandbits(64)]),
        max_tokens=budget,
        logprobs=rng.choice([None, None, 0, 4]),
    )


def random_requests(rng: random.Random, count: int) -> list[Request]:
    params = [random_params(rng) for _ in range(count)]
    lengths = [rng.choice([1, 2, rng.randint(1, MAX_LEN - (one.max_tokens or 0))]) for one in params]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return requests_of(prompts, params, max_model_len=MAX_LEN)


def serve(engine: Engine, requests: list[Request], rng: random.Random, abort_rate: float = 0.0) -> set[str]:
    """Sends requests at random times, aborting some at random moments; returns the ids of those."""
    coming, aborted = list(reversed(requests)), set()
    while coming or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 2, 6])):
            if coming:
                engine.add(coming.pop())
        if rng.random() < abort_rate:
            victim = rng.choice(requests)
            if engine.abort(victim.id):
                aborted.add(victim.id)
        engine.step()
    return aborted


def chain_of_a_model() -> Engine:
    network, leaves = target()
    # The number of logprobs makes the program one that no other test has compiled.
    runner = make_runner(
        target(),
        Standalone(network, chain(NUM_STEPS), VOCAB),
        nearly(leaves, 0.04),
        max_model_len=MAX_LEN,
        num_top_logprobs=5,
        processors=tuple(PROCESSORS.values()),
    )
    return engine_over(
        runner, chunked_prefill_size=32, prefill_chunk_buckets=(8, 32), decode_row_buckets=(1, 4), pool_pages=12
    )


def tree_of_a_head() -> Engine:
    head, leaves = random_head("eagle3")
    method = Feature(head, TreeShape(5, 4, 8))
    runner = make_runner(
        target(),
        method,
        leaves,
        max_model_len=MAX_LEN,
        num_top_logprobs=5,
        processors=tuple(PROCESSORS.values()),
    )
    return engine_over(
        runner, chunked_prefill_size=32, prefill_chunk_buckets=(32,), decode_row_buckets=(4,), pool_pages=12
    )


@pytest.mark.parametrize(("make", "buckets"), [(chain_of_a_model, {(1, 4), (8, 32)}), (tree_of_a_head, {(4,), (32,)})])
def test_nothing_is_traced_or_compiled_after_warm_up(make, buckets):
    """Public report: the first sampled request recompiles verify in the middle of a run."""
    engine = make()
    with compile_events() as events:
        warm_up(engine, progress=False)
        assert any(TRACED in event for event in events)
        assert any(COMPILED in event for event in events)
        events.clear()
        rng = random.Random(0)
        serve(engine, random_requests(rng, 200), rng, abort_rate=0.02)
        assert not events
    assert engine.metrics.finished == 200
    assert engine.metrics.preemptions > 0
    assert {engine.limits.row_buckets, engine.limits.chunk_buckets} == buckets


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_page_leaks_over_500_requests_with_aborts(schedule):
    """Public report: two pages leak with each request (sglang-jax #1147)."""
    rng = random.Random(1)
    engine = engine_of("good", schedule, pool_pages=9)
    requests = random_requests(rng, 500)
    aborted = serve(engine, requests, rng, abort_rate=0.3)
    assert engine.num_free_pages == 9
    assert engine._scheduler._rows.num_free == 3
    assert not engine._in_flight
    metrics = engine.metrics
    assert metrics.requests == metrics.finished == 500
    assert len(aborted) > 20
    assert {request.id for request in requests if request.finish_reason == "abort"} == aborted
    assert metrics.preemptions == sum(request.epoch for request in requests) > 0
    assert metrics.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
    assert metrics.emitted_tokens == sum(len(request.output_ids) for request in requests)
    assert metrics.stats == RoundStats.of(emission for request in requests for emission in request.emissions)
    assert sum(metrics.accepted_per_position) == metrics.accepted <= metrics.proposed


def test_a_dispatch_is_put_together_without_the_device(monkeypatch):
    """Settings that are made on the device and read back wait for the rounds in flight: v2 would be v1."""
    runner = engine_of("ngram").runner
    monkeypatch.setattr(jaxspec.state, "jnp", None)
    chunks = runner.empty_chunks(2, 16)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(chunks))
