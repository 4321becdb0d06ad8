"""What a verdict does to a request, and which verdicts cannot be right."""

import numpy as np
import pytest

from jaxspec.batches import LENGTH, RUNNING, STOP, DecodeBatch, VerdictArrays
from jaxspec.metrics import RoundStats
from jaxspec.request import Request
from jaxspec.scheduler import Scheduler
from tests.simulated_device import make_request, make_scheduler, prefilled, take_decode, take_prefill, verdict_of


def test_results_of_an_earlier_epoch_are_dropped():
    scheduler = make_scheduler()
    request = make_request("r", [1, 2], 20)
    prefilled(scheduler, request)
    batch = take_decode(scheduler)
    scheduler._preempt(request)
    assert scheduler.retire_decode(batch, verdict_of([5, 6], accepted=1)) == []
    again = take_prefill(scheduler)
    assert again.chunks[0].tokens == [1, 2, 1]
    scheduler.retire_prefill(again, verdict_of([5]))
    assert request.output_ids == [1, 5]
    assert RoundStats.of(request.emissions) == RoundStats(prefill_tokens=2)


def test_stop_inside_the_budget_wins_over_length():
    """sglang #31599: a block with a stop token that crosses the budget ends with the stop, and nothing leaks."""
    scheduler = make_scheduler()
    request = make_request("r", [1], 5, stop_ids=(12,))
    prefilled(scheduler, request, token=10)
    batch = take_decode(scheduler)
    (progress,) = scheduler.retire_decode(batch, verdict_of([11, 12], STOP, accepted=2))
    assert progress.finish == "stop"
    assert request.output_ids == [10, 11, 12]
    assert request.stop_reason == 12


def test_a_stop_string_cuts_tokens_logprobs_and_counts_alike():
    """vLLM PR #47616. The device said "length" for the same round; the stop string came first."""
    scheduler = make_scheduler()
    request = make_request("r", [1], 5, logprobs=1)
    scheduler.add(request)
    top = {
        "logprobs": np.array([[[-1.0]]]),
        "top_ids": np.array([[[[3, 4]]]]),
        "top_logprobs": np.array([[[[-1, -2]]]]),
    }
    scheduler.retire_prefill(take_prefill(scheduler), verdict_of([3])._replace(**top))
    assert request.logprobs[0].top == {3: -1.0}
    batch = take_decode(scheduler)
    verdict = verdict_of([3, 4, 5, 6], LENGTH, accepted=3)
    verdict = verdict._replace(
        logprobs=np.full((1, 1, 4), -0.5), top_ids=np.ones((1, 1, 4, 2), int), top_logprobs=np.zeros((1, 1, 4, 2))
    )
    (progress,) = scheduler.retire_decode(batch, verdict)
    assert progress.finish == "length"
    scheduler.finish(request, "stop", keep=3, stop_reason="END")
    assert request.output_ids == [3, 3, 4]
    assert len(request.logprobs) == 3
    completion = request.completion("text")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert (completion.rounds, completion.accept_length, completion.accepted) == (1, 2.0, 2)
    assert completion.accepted_per_position == [1, 1]
    assert scheduler.metrics.emitted_tokens == 3
    assert scheduler.metrics.accepted_per_position == [1, 1, 0]


def test_rounds_after_the_finish_are_no_rounds():
    scheduler = make_scheduler(rounds_per_dispatch=4)
    request = make_request("r", [1], 4)
    prefilled(scheduler, request)
    batch = take_decode(scheduler)
    counts, finish = np.array([[2], [1], [0], [0]]), np.array([[RUNNING], [LENGTH], [RUNNING], [RUNNING]])
    tokens = np.full((4, 1, 4), 8)
    scheduler.retire_decode(batch, VerdictArrays(tokens, counts, finish, np.minimum(counts, 1), counts * 0 + 3))
    assert request.completion("").rounds == scheduler.metrics.rounds == 2
    assert request.completion("").accept_length == 1.5
    assert scheduler.metrics.accept_rate == 2 / 6


def test_logprobs_only_for_requests_that_ask():
    scheduler = make_scheduler()
    request = make_request("r", [1], 5)
    scheduler.add(request)
    (progress,) = scheduler.retire_prefill(take_prefill(scheduler), verdict_of([3]))
    assert progress.logprobs is None
    assert request.logprobs == []
    asking = make_request("asking", [1], 5, logprobs=0)
    scheduler.add(asking)
    verdict = verdict_of([3])._replace(logprobs=np.array([[[-1.5]]]))
    (progress,) = scheduler.retire_prefill(take_prefill(scheduler), verdict)
    assert progress.logprobs is not None
    assert (progress.logprobs[0].logprob, progress.logprobs[0].top) == (-1.5, {})
    with pytest.raises(RuntimeError, match="asks for logprobs"):
        scheduler.retire_decode(take_decode_of(scheduler, asking), verdict_of([3]))


def take_decode_of(scheduler: Scheduler, request: Request) -> DecodeBatch:
    """A decode batch cut down to one request."""
    batch = take_decode(scheduler)
    entries = tuple(entry for entry in batch.entries if entry.request is request)
    return DecodeBatch(entries, 1)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (verdict_of([]), "emitted 0 tokens"),
        (verdict_of([3, 3, 3, 3, 3, 3]), "more than its budget"),
        (verdict_of([3, 3, 3, 3]), "the device goes on"),
        (verdict_of([3], LENGTH), "by length after 2"),
        (verdict_of([3], STOP), "stopped at token 3"),
        (verdict_of([3, 3], accepted=3), "3 drafts accepted"),
        (verdict_of([3, 3], accepted=2, proposed=1), "of 1 proposed"),
        (verdict_of([3], finish=7), "finish code 7"),
    ],
)
def test_an_impossible_verdict_is_an_error_with_the_state(verdict, message):
    scheduler = make_scheduler()
    request = make_request("r", [1], 5)
    prefilled(scheduler, request)
    batch = take_decode(scheduler)
    with pytest.raises(RuntimeError, match=message) as error:
        scheduler.retire_decode(batch, verdict)
    assert "request r" in str(error.value)
