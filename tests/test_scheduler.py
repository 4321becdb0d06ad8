"""Admission, reservation, preemption and what ends a request, one decision at a time."""

import pytest

from jaxspec.batches import LENGTH
from jaxspec.request import Status
from tests.simulated_device import (
    make_limits,
    make_request,
    make_scheduler,
    prefilled,
    take_decode,
    take_prefill,
    verdict_of,
)


def test_chunks_carry_what_the_device_needs_also_after_preemption():
    scheduler = make_scheduler(num_pages=8, max_chunk=4, chunk_buckets=(4,))
    old = make_request("old", [1], 30)
    request = make_request("r", [1, 2, 3, 4, 5, 6], 10, min_tokens=2)
    scheduler.add(old)
    scheduler.add(request)
    batch = take_prefill(scheduler)
    assert [chunk.request for chunk in batch.chunks] == [old]  # two rows of 4 tokens would be more than max_chunk
    scheduler.retire_prefill(batch, verdict_of([9]))
    first = take_prefill(scheduler).chunks[0]
    assert (first.start, first.tokens, first.next_token, first.is_last) == (0, [1, 2, 3, 4], 5, False)
    batch = take_prefill(scheduler)
    last = batch.chunks[0]
    assert (last.start, last.tokens, last.next_token, last.is_last) == (4, [5, 6], -1, True)
    assert (last.remaining, last.min_len) == (10, 8)
    scheduler.retire_prefill(batch, verdict_of([7]))
    scheduler._preempt(request)
    assert (request.row, request.pages, request.status) == (None, [], Status.WAITING)
    chunks = [take_prefill(scheduler).chunks[0] for _ in range(2)]
    assert [chunk.tokens for chunk in chunks] == [[1, 2, 3, 4], [5, 6, 7]]
    assert [(chunk.remaining, chunk.min_len, chunk.epoch) for chunk in chunks] == [(9, 8, 1)] * 2


def test_the_youngest_is_preempted_and_comes_back_first():
    scheduler = make_scheduler(num_pages=11, page_size=4, prefill_rows=3, max_chunk=12)
    requests = [make_request(name, [1, 2], 30) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    batch = take_prefill(scheduler)
    assert len(batch.chunks) == 3
    late = make_request("d", [1], 2)
    scheduler.add(late)
    # The rows hold 2 pages each, then 3; at the third dispatch each wants a fourth, and there are two left.
    while requests[2].status is Status.RUNNING:
        assert scheduler.plan_decode()
    assert [r.status for r in requests[:2]] == [Status.RUNNING] * 2
    assert list(scheduler._waiting) == [requests[2], late]
    assert scheduler.metrics.preemptions == 1
    # It needs 2 of these, but the older two will want theirs next: it is not computed anew for nothing.
    assert scheduler.pool.num_free == 3
    assert scheduler.plan_prefill() is None


def test_one_token_is_a_prefill_alone_and_none_is_nothing():
    scheduler = make_scheduler()
    none = make_request("none", [1, 2], 0)
    progress = scheduler.add(none)
    assert progress is not None
    assert (progress.token_ids, progress.finish, none.finish_reason) == ([], "length", "length")
    assert not scheduler.has_work
    assert scheduler.plan_prefill() is None
    one = make_request("one", [1, 2], 1)
    scheduler.add(one)
    batch = take_prefill(scheduler)
    assert scheduler.plan_decode() is None  # its only token is in flight
    (progress,) = scheduler.retire_prefill(batch, verdict_of([4], LENGTH))
    assert (progress.token_ids, progress.finish) == ([4], "length")
    assert scheduler.metrics.decode_dispatches == scheduler.metrics.rounds == scheduler.metrics.proposed == 0
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 64


def test_no_dispatch_for_a_row_that_is_sure_to_reach_its_budget():
    scheduler = make_scheduler(rounds_per_dispatch=4, path_len=1)
    scheduler.add(make_request("r", [1], 6))
    assert take_prefill(scheduler)
    assert scheduler.plan_decode()
    assert scheduler.plan_decode()  # 1 + 4 tokens are sure, 6 are allowed
    assert scheduler.plan_decode() is None


def test_abort_works_in_every_state():
    scheduler = make_scheduler(max_running=1, row_buckets=(1,))
    running, waiting = make_request("running", [1], 9), make_request("waiting", [1], 9)
    prefilled(scheduler, running)
    scheduler.add(waiting)
    batch = take_decode(scheduler)
    assert scheduler.abort("waiting")
    assert scheduler.abort("running")
    assert not scheduler.abort("running")
    assert not scheduler.abort("unknown")
    assert scheduler.retire_decode(batch, verdict_of([5])) == []
    assert (running.output_ids, running.finish_reason, waiting.output_ids) == ([1], "abort", [])
    assert not scheduler.has_work
    assert scheduler.pool.num_free == 64
    with pytest.raises(RuntimeError, match="finished already"):
        scheduler.finish(running, "abort")


def test_abort_between_chunks_frees_row_and_pages():
    scheduler = make_scheduler(max_chunk=4)
    scheduler.add(make_request("r", [1] * 10, 9))
    batch = take_prefill(scheduler)
    assert scheduler.abort("r")
    assert scheduler.retire_prefill(batch, verdict_of([5])) == []
    assert scheduler.plan_prefill() is None
    assert scheduler.pool.num_free == 64


def test_what_can_never_fit_is_refused_with_the_numbers():
    scheduler = make_scheduler(num_pages=4, page_size=4)
    with pytest.raises(ValueError, match=r"needs 5 pages of 4 tokens; the pool has 4.*max_total_tokens to at least 20"):
        scheduler.add(make_request("r", [1] * 10, 7))
    assert scheduler.add(make_request("fits", [1] * 10, 6)) is None
    with pytest.raises(ValueError, match="max_model_len=128"):
        scheduler.add(make_request("long", [1] * 120, 9))
    with pytest.raises(ValueError, match="'fits' is in use"):
        scheduler.add(make_request("fits", [1], 1))


def test_a_full_queue_is_refused_and_free_rows_are_no_queue():
    scheduler = make_scheduler(max_running=2, row_buckets=(2,), max_queued=1)
    for name in "abc":
        scheduler.add(make_request(name, [1], 4))
    with pytest.raises(ValueError, match="queue is full: 0 requests run, 3 wait, max_queued_requests=1"):
        scheduler.add(make_request("d", [1], 4))
    take_prefill(scheduler)
    with pytest.raises(ValueError, match="queue is full: 2 requests run, 1 wait"):
        scheduler.add(make_request("e", [1], 4))


def test_prefill_batches_share_one_shape_within_the_limit():
    scheduler = make_scheduler(prefill_rows=2, max_chunk=16, chunk_buckets=(4, 8, 16))
    assert scheduler.limits.prefill_shapes == [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8)]
    for name, size in {"a": 3, "b": 12, "c": 12, "d": 1}.items():
        scheduler.add(make_request(name, [1] * size, 4))
    planned = []
    while (batch := scheduler.plan_prefill()) is not None:
        chunks = [(chunk.request.id, len(chunk.tokens)) for chunk in batch.chunks]
        planned.append((chunks, batch.num_rows, batch.chunk_len))
    assert planned == [([("a", 3), ("b", 8)], 2, 8), ([("b", 4), ("c", 8)], 2, 8), ([("c", 4), ("d", 1)], 2, 4)]


def test_the_oldest_waits_for_pages_and_is_not_overtaken():
    scheduler = make_scheduler(num_pages=8, page_size=4)
    prefilled(scheduler, make_request("a", [1] * 10, 20))
    scheduler.add(make_request("big", [1] * 16, 8))
    scheduler.add(make_request("small", [1], 1))
    assert scheduler.plan_prefill() is None
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"row_buckets": (1, 2)}, "must end with at least 4"),
        ({"chunk_buckets": (8, 4, 16)}, "ascending"),
        ({"path_len": 0}, "path_len=0"),
    ],
)
def test_limits_that_do_not_cover_the_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_limits(**sizes)


def test_books_that_do_not_agree_are_an_error():
    scheduler = make_scheduler()
    request, other = make_request("r", [1], 9), make_request("other", [1], 9)
    prefilled(scheduler, request)
    prefilled(scheduler, other)
    other.row = request.row
    with pytest.raises(RuntimeError, match="holds row 0, which is not its own"):
        scheduler.plan_decode()
    request.pages.clear()
    with pytest.raises(RuntimeError, match="may write"):
        scheduler._rows.check_holds(request, 1)
