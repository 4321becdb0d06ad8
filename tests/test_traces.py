"""After warm-up nothing is traced or compiled, whatever arrives; and nothing is lost, whatever is aborted."""

import random

import jax
import pytest

from jaxspec import step
from jaxspec.config import SamplingParams
from jaxspec.draft.standalone import Standalone
from jaxspec.engine import Engine
from jaxspec.request import Request
from tests.tiny import VOCAB, make_engine, requests_of, tiny_model

COMPILED = "/jax/core/compile/backend_compile_duration"
TRACED = "/jax/core/compile/jaxpr_trace_duration"
MAX_LEN = 160


class _Compilations:
    """Names of tracing and compilation events since the last `clear`; listeners cannot be taken off one by one."""

    def __init__(self):
        self.events: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **kwargs) -> None:
        if event in (COMPILED, TRACED):
            self.events.append(event)

    def clear(self) -> None:
        self.events.clear()


@pytest.fixture(scope="module")
def compilations() -> _Compilations:
    return _Compilations()


@pytest.fixture(scope="module")
def engine(compilations) -> Engine:
    """Warmed up, as `launch` does it. The pool is small enough that requests wait for pages and are preempted."""
    target, draft = tiny_model(1), tiny_model(2)
    method = Standalone(draft[0], 3, VOCAB)
    engine = make_engine(target, method, draft[1], num_rows=4, num_pages=13, chunked_prefill_size=64)
    for _ in engine.runner.warm_up(engine.warmup_programs()):
        pass
    assert compilations.events
    return engine


def _random_requests(rng: random.Random, count: int) -> list[Request]:
    """Every kind of parameter at random."""
    prompts, params = [], []
    for _ in range(count):
        length = rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, 110)))
        prompts.append([rng.randrange(VOCAB) for _ in range(length)])
        params.append(
            SamplingParams(
                temperature=rng.choice((0.0, 0.3, 1.0, 1.7)),
                top_p=rng.choice((1.0, 0.9, 0.3)),
                top_k=rng.choice((-1, 1, 5, 50)),
                min_p=rng.choice((0.0, 0.1)),
                seed=rng.choice((None, rng.getrandbits(64))),
                max_tokens=rng.choice((0, 1, 2, rng.randint(1, 80))),
                stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.randrange(4))],
                logprobs=rng.choice((None, None, 0, 4)),
            )
        )
    return requests_of(prompts, params, max_model_len=MAX_LEN)


def _serve(engine: Engine, requests: list[Request], rng: random.Random, abort_share: float = 0.0) -> int:
    """Adds requests a few at a time while others run, aborting some at random moments; returns how many it aborted."""
    waiting, aborted = list(requests), 0
    while waiting or engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if waiting:
                engine.add(waiting.pop())
        engine.step()
        unfinished = [request for request in requests if not request.is_finished and request.order >= 0]
        if unfinished and rng.random() < abort_share:
            aborted += engine.abort(rng.choice(unfinished).id)
    return aborted


def test_nothing_is_traced_or_compiled_after_warm_up(engine, compilations):
    """Public report: the first sampled request recompiles verify in the middle of a run (sglang-jax)."""
    rng = random.Random(3)
    prefill, decode = step.compiled_steps(engine.runner.program)
    requests = _random_requests(rng, 200)
    sizes = prefill._cache_size(), decode._cache_size()
    compilations.clear()
    _serve(engine, requests, rng)
    assert compilations.events == []
    assert (prefill._cache_size(), decode._cache_size()) == sizes
    assert all(request.is_finished for request in requests)


def test_no_page_is_lost_over_500_requests_with_aborts(engine):
    """Public report: two pages leak with each request (sglang-jax #1147, #1098)."""
    rng = random.Random(4)
    free, before = engine.num_free_pages, engine.metrics.preemptions
    requests = _random_requests(rng, 500)
    aborted = _serve(engine, requests, rng, abort_share=0.3)
    assert aborted > 20
    assert engine.metrics.preemptions > before
    assert engine.num_free_pages == free == engine.plan.num_pages
    assert not engine.has_work
    assert {request.finish_reason for request in requests} == {"stop", "length", "abort"}


def test_the_totals_are_the_sums_over_requests(engine):
    """Public report: an accept rate above 1, a bonus token counted as a draft (sglang PR #11572, PR #23530)."""
    stats = engine.metrics.stats
    before = stats.emitted, stats.rounds, stats.accepted, stats.proposed, stats.round_tokens
    requests = _random_requests(random.Random(5), 40)
    _serve(engine, requests, random.Random(5))
    done = [request.completion("") for request in requests]
    after = stats.emitted, stats.rounds, stats.accepted, stats.proposed, stats.round_tokens
    emitted, rounds, accepted, proposed, round_tokens = (new - old for new, old in zip(after, before, strict=True))
    assert emitted == sum(len(completion.token_ids) for completion in done)
    assert rounds == sum(completion.rounds for completion in done)
    assert accepted == sum(completion.accepted for completion in done)
    assert proposed == sum(completion.proposed for completion in done)
    assert round_tokens == round(sum((completion.accept_length or 0) * completion.rounds for completion in done))
    assert 0 < accepted <= proposed
