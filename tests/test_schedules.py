"""Both schedules against a simulated device that reads every token through the pages: the outputs of plain decoding."""

import random

import pytest

from jaxspec.metrics import RoundStats
from jaxspec.pages import PagePool
from jaxspec.request import Request
from jaxspec.scheduler import Scheduler
from tests.simulated_device import SimulatedEngine, make_limits, make_request, plain_outputs, random_requests


def check_against_plain(request: Request) -> None:
    outputs, reason = plain_outputs(request)
    assert request.output_ids == outputs, request.id
    assert request.finish_reason == reason
    assert request.stop_reason == (outputs[-1] if reason == "stop" else None)


def check_counts(request: Request) -> None:
    """Each token comes from one retired step; a round that emitted nothing is no round."""
    stats = RoundStats.of(request.emissions)
    assert stats.emitted == len(request.output_ids)
    assert stats.accepted <= stats.proposed
    assert all(emission.count > 0 for emission in request.emissions)
    assert sum(stats.accepted_per_position) == stats.accepted
    assert not request.output_ids or stats.prefill_tokens >= 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_outputs_equal_plain_decoding_in_every_schedule(in_flight, rounds, page_size):
    rng = random.Random(in_flight + 2 * rounds + 10 * page_size)
    limits = make_limits(rounds_per_dispatch=rounds, rounds_in_flight=in_flight)
    pool = PagePool(256 // page_size, page_size)
    engine = SimulatedEngine(limits, pool, accept=lambda: rng.randint(0, limits.path_len - 1))
    requests = random_requests(rng, 40, max_len=60)
    engine.run(requests)
    for request in requests:
        check_against_plain(request)
        check_counts(request)
    assert pool.num_free == pool.num_pages
    assert engine.shapes <= set(limits.prefill_shapes)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("in_flight", [0, 1, 3])
def test_preemption_does_not_change_outputs(in_flight, rounds):
    rng = random.Random(5)
    limits = make_limits(rounds_per_dispatch=rounds, rounds_in_flight=in_flight)
    pool = PagePool(44, 4)  # the longest request alone needs 27 pages
    engine = SimulatedEngine(limits, pool, accept=lambda: rng.randint(0, 3))
    requests = [make_request(f"r{i}", [i] * (5 + i), 100 - i, min_tokens=3) for i in range(12)]
    engine.run(requests)
    assert engine.scheduler.metrics.preemptions > 0
    assert max(request.epoch for request in requests) > 0
    for request in requests:
        check_against_plain(request)
        check_counts(request)
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("path_len", [1, 4])
def test_no_page_leaks_over_500_requests_with_aborts(rounds, path_len):
    """Requests come at random times, are aborted or ended by the host at random, and the pool is small."""
    rng = random.Random(rounds)
    limits = make_limits(rounds_per_dispatch=rounds, path_len=path_len, max_running=4)
    pool = PagePool(30, 4)
    lag = lambda: rng.choice([0, 1, 1, 2, 4])  # noqa: E731
    engine = SimulatedEngine(limits, pool, accept=lambda: rng.randint(0, path_len - 1), lag=lag)
    requests = random_requests(rng, 500, max_len=100)
    # The host ends these after so many tokens, as a stop string would.
    host_stops = {r.id: rng.randint(1, r.budget) for r in requests if rng.random() < 0.3}
    coming, aborted = list(reversed(requests)), set()
    while coming or engine.scheduler.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if coming:
                engine.scheduler.add(coming.pop())
        if rng.random() < 0.1:
            victim = rng.choice(requests)
            if engine.scheduler.abort(victim.id):
                aborted.add(victim.id)
        for progress in engine.step():
            request, keep = progress.request, host_stops.get(progress.request.id)
            if keep is not None and len(request.output_ids) >= keep:
                engine.scheduler.finish(request, "stop", keep=keep, stop_reason="END")
    for request in requests:
        outputs, _ = plain_outputs(request)
        if request.id in aborted:
            assert request.finish_reason == "abort"
            assert request.output_ids == outputs[: len(request.output_ids)]
        elif host_stops.get(request.id, request.budget + 1) <= len(outputs):
            assert request.output_ids == outputs[: host_stops[request.id]]
            assert (request.finish_reason, request.stop_reason) == ("stop", "END")
        else:
            check_against_plain(request)
        check_counts(request)
    assert aborted
    assert pool.num_free == pool.num_pages == 30
    check_totals(engine.scheduler, requests)


def check_totals(scheduler: Scheduler, requests: list[Request]) -> None:
    """The engine's totals are the sums over its requests, cuts and preemptions included."""
    metrics = scheduler.metrics
    total = RoundStats.of(emission for request in requests for emission in request.emissions)
    positions = metrics.accepted_per_position
    total.accepted_per_position += [0] * (len(positions) - len(total.accepted_per_position))
    assert metrics.stats == total
    assert metrics.requests == metrics.finished == len(requests)
    assert metrics.preemptions == sum(request.epoch for request in requests) > 0
    assert metrics.emitted_tokens == sum(len(request.output_ids) for request in requests)


def test_same_counts_in_both_schedules():
    """v1 and v2 report the same tokens and the same acceptance."""
    seen = []
    for in_flight in (0, 1):
        engine = SimulatedEngine(make_limits(rounds_in_flight=in_flight), PagePool(64, 4), accept=lambda: 2)
        requests = random_requests(random.Random(3), 20, max_len=50)
        engine.run(requests)
        seen.append([(r.output_ids, r.emissions) for r in requests])
    assert seen[0] == seen[1]


def test_the_oldest_request_is_never_preempted_and_each_finishes():
    limits = make_limits(rounds_per_dispatch=4)
    engine = SimulatedEngine(limits, PagePool(30, 4), accept=lambda: 0)
    requests = [make_request(f"r{i}", [i], 100) for i in range(6)]
    engine.run(requests, max_steps=500)
    assert requests[0].epoch == 0
    assert sum(request.epoch for request in requests) > 0


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_preempted_request_waits_until_it_can_go_on(rounds):
    """Both fit when they start and not when they end; the younger is not computed anew only to be preempted again."""
    limits = make_limits(rounds_per_dispatch=rounds, max_chunk=128, chunk_buckets=(128,))
    engine = SimulatedEngine(limits, PagePool(9, 16), accept=lambda: 0)
    requests = [make_request("a", [1] * 50, 30), make_request("b", [2] * 44, 32)]
    engine.run(requests)
    assert requests[1].epoch <= 1
    for request in requests:
        check_against_plain(request)


def test_pages_cover_every_round_in_flight():
    """Lengths known to the host lag behind: the reservation counts every round that is not retired."""
    limits = make_limits(rounds_per_dispatch=4, rounds_in_flight=3)
    engine = SimulatedEngine(limits, PagePool(128, 1), accept=lambda: 3)
    request = make_request("r", [1], 100)
    engine.run([request])
    check_against_plain(request)
