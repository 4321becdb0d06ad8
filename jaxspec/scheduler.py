"""Who runs: admission, page reservation, preemption, and the bookkeeping of retired rounds."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from jaxspec.batches import (
    FINISH_REASONS,
    DecodeBatch,
    Entry,
    Limits,
    PrefillBatch,
    PrefillChunk,
    Progress,
    VerdictArrays,
    bucket_of,
)
from jaxspec.metrics import EngineMetrics
from jaxspec.outputs import FinishReason
from jaxspec.pages import PagePool
from jaxspec.prefix import Prefixes
from jaxspec.request import Request, Status
from jaxspec.retire import append_prompt_logprobs, append_steps, cut_outputs, read_steps
from jaxspec.rows import Rows

__all__ = ["DecodeBatch", "Entry", "Limits", "PrefillBatch", "PrefillChunk", "Progress", "Scheduler", "VerdictArrays"]


class Scheduler:
    """Plans what the device does next and keeps the books of what it did.

    The engine dispatches each batch before it plans the next, and retires dispatches in order, any number of them
    later. The device runs them in order, so that a row or page freed here may be given away at once: what was
    dispatched with the old owner is done before the new owner's prefill begins. A request that ends on the device
    (stop token, budget) is known here when it is retired; until then the device keeps its row inactive. What is in
    flight for a request that was preempted, aborted or finished is dropped when it is retired.

    Attributes:
        metrics: totals; the engine adds the seconds.
    """

    def __init__(self, limits: Limits, pool: PagePool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.pool = pool
        self.metrics = EngineMetrics()
        self._clock = clock
        self._orders = itertools.count()
        self._requests: dict[str, Request] = {}  # every request that is not finished
        self._waiting: deque[Request] = deque()  # oldest first
        self._running: list[Request] = []  # oldest first; every one is older than every waiting one
        self._rows = Rows(limits.max_running, pool)
        self._prefixes = Prefixes(pool, is_on=limits.prefix_caching)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> Progress | None:
        """Queues a request.

        Returns:
            None, or the Progress of a request that is finished at once because its budget is 0.

        Raises:
            ValueError: the queue is full, the id is in use, or the request can never fit into the context or the pool.
        """
        if request.id in self._requests or request.order >= 0:
            raise ValueError(f"request id {request.id!r} is in use; give each request its own.")
        self.limits.check_fits(request, self.pool)
        if request.budget:
            self.limits.check_queue(self.num_running, self.num_waiting)
        request.arrival = self._clock()
        request.order = next(self._orders)
        self.metrics.requests += 1
        self.metrics.prompt_tokens += len(request.prompt_ids)
        self._requests[request.id] = request
        if request.budget == 0:
            self._end(request, "length")
            return Progress(request, [], None if request.params.logprobs is None else [], "length")
        self._waiting.append(request)
        return None

    def abort(self, request_id: str) -> bool:
        """Ends a request with the outputs known so far; False when there is no unfinished request of this id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def finish(
        self, request: Request, reason: FinishReason, keep: int | None = None, stop_reason: str | int | None = None
    ) -> None:
        """Ends a request from the host: a stop string, an abort.

        With `keep`, its outputs are first cut to that many tokens, logprobs and counts alike. Only such a finish may
        override one that the device reported in the same dispatch: the stop string came first.

        Raises:
            RuntimeError: it is finished and nothing is to be cut, or `keep` is more than it has.
        """
        if keep is None and request.is_finished:
            raise RuntimeError(f"request {request.id} is finished already, by {request.finish_reason}.")
        if keep is not None:
            cut_outputs(request, keep, self.metrics.stats)
        if not request.is_finished:
            self._end(request, reason)
        request.finish_reason, request.stop_reason = reason, stop_reason

    def plan_prefill(self) -> PrefillBatch | None:
        """Takes rows and pages for waiting requests and plans the next chunks; None when nothing can be prefilled.

        The oldest request decides: where its chunk is short enough for a batch of `prefill_rows` rows, others join
        with chunks of that kind; else it is computed alone.
        """
        limits = self.limits
        candidates = self._prefill_candidates()
        oldest = next(candidates, None)
        if oldest is None:
            return None
        chunks = [self._take_chunk(oldest, limits.max_chunk)]
        if len(chunks[0].tokens) <= limits.group_chunk:
            others = itertools.islice(candidates, limits.prefill_rows - 1)
            chunks += [self._take_chunk(request, limits.group_chunk) for request in others]
        self._prefixes.name(chunk.request for chunk in chunks)
        longest = max(len(chunk.tokens) for chunk in chunks)
        self.metrics.prefill_dispatches += 1
        return PrefillBatch(
            chunks=tuple(chunks),
            num_rows=1 if len(chunks) == 1 else limits.prefill_rows,
            chunk_len=bucket_of(limits.chunk_buckets, longest),
        )

    def plan_decode(self) -> DecodeBatch | None:
        """Reserves the pages of the next dispatch and plans it; None when no row can be decoded.

        A row that is sure to reach its budget by what is in flight is left out. When pages run out, the youngest
        running request is preempted.
        """
        entries: list[Entry] = []
        # Oldest first: whom a reservation preempts is younger, or the request itself, and so never planned already.
        for request in list(self._running):
            if request.can_decode and self._reserve(request):
                entries.append(Entry(request, request.epoch, self._rows.row_of(request)))
        if not entries:
            return None
        for entry in entries:
            entry.request.in_flight += self.limits.rounds_per_dispatch
        self.metrics.decode_dispatches += 1
        return DecodeBatch(tuple(entries), bucket_of(self.limits.row_buckets, len(entries)))

    def decodable(self) -> list[Entry]:
        """Running requests that a round could run for now, oldest first."""
        return [Entry(one, one.epoch, self._rows.row_of(one)) for one in self._running if one.can_decode]

    def page_row(self, request: Request) -> list[int]:
        """The pages of a running request, in the order of its tokens. Not to be changed; read it at each dispatch."""
        return request.pages

    def retire_prefill(self, batch: PrefillBatch, verdict: VerdictArrays) -> list[Progress]:
        """Takes in what a prefill emitted: one token for each last chunk. R = P = 1 in `verdict`."""
        progress: list[Progress] = []
        for index, chunk in enumerate(batch.chunks):
            if self._is_live(chunk.request, chunk.epoch):
                append_prompt_logprobs(chunk, verdict.echo, index)
                if chunk.is_last:
                    chunk.request.prefill_in_flight = False
                    progress.append(self._retire(chunk.request, verdict, index, is_round=False))
        return progress

    def retire_decode(self, batch: DecodeBatch, verdict: VerdictArrays) -> list[Progress]:
        """Takes in what a decode dispatch emitted, and frees the rows and pages of requests that finished."""
        progress: list[Progress] = []
        for index, entry in enumerate(batch.entries):
            if self._is_live(entry.request, entry.epoch):
                entry.request.in_flight -= self.limits.rounds_per_dispatch
                progress.append(self._retire(entry.request, verdict, index, is_round=True))
        return progress

    def _prefill_candidates(self) -> Iterator[Request]:
        """Oldest first: requests that are partly prefilled, then waiting ones, which are admitted as they are drawn."""
        for request in list(self._running):
            if request.prefilled < len(request.prefill_ids):
                yield request
        while (request := self._admit()) is not None:
            yield request

    def _admit(self) -> Request | None:
        """Gives the oldest waiting request a row and the pages of its sequence; None when it has to wait on."""
        if not self._waiting or not self._rows.num_free:
            return None
        request = self._waiting[0]
        # As far as it gets before the host hears of it: with less, it would be preempted at once when pages are scarce.
        num_tokens = self._reach(request, (1 + self.limits.rounds_in_flight) * self.limits.rounds_per_dispatch)
        shared = self._prefixes.find(request, self._running)
        if shared is None or not self._rows.has_room(num_tokens, shared, self.limits.growth):
            return None
        self._rows.take(request, num_tokens, shared)
        self._waiting.popleft()
        if self._running and self._running[-1].order > request.order:
            raise RuntimeError(f"request {request.id} was overtaken by the younger {self._running[-1].id}.")
        self._running.append(request)
        request.status = Status.RUNNING
        request.prefill_ids, request.num_named = request.sequence, len(shared)
        request.prefilled = request.num_adopted = len(shared) * self.pool.page_size
        self.metrics.reused_tokens += request.num_adopted
        return request

    def _take_chunk(self, request: Request, max_len: int) -> PrefillChunk:
        start = request.prefilled
        end = min(start + max_len, len(request.prefill_ids))
        is_last = end == len(request.prefill_ids)
        self._rows.check_holds(request, end)
        request.prefilled = end
        request.prefill_in_flight = is_last
        self.metrics.prefilled_tokens += end - start
        return PrefillChunk(
            request=request,
            epoch=request.epoch,
            row=self._rows.row_of(request),
            start=start,
            tokens=request.prefill_ids[start:end],
            next_token=-1 if is_last else request.prefill_ids[end],
            is_last=is_last,
            remaining=request.remaining,
            min_len=request.min_len,
            adopted=request.prefill_ids[:start] if start == request.num_adopted else [],
        )

    def _reserve(self, request: Request) -> bool:
        """Extends its pages to what the next dispatch may reach; False when it was preempted itself."""
        reach = self._reach(request, request.in_flight + self.limits.rounds_per_dispatch)
        while not self._rows.extend(request, reach):
            if len(self._running) == 1:
                state = f"{len(request.pages)} held, {self.pool.num_free} of {self.pool.num_pages} free"
                raise RuntimeError(f"request {request.id} runs alone and finds no pages for {reach} tokens: {state}.")
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        self._rows.check_holds(request, reach)
        return True

    def _reach(self, request: Request, rounds: int) -> int:
        """Most tokens after so many rounds: each adds up to `path_len` to what the host knows, a prefill one."""
        return min(request.known_len + rounds * self.limits.path_len + 1, request.max_len)

    def _preempt(self, request: Request) -> None:
        """Puts a running request back to the front of the queue, to be computed anew from what is known of it."""
        self._release(request)
        request.status = Status.WAITING
        request.epoch += 1
        self._waiting.appendleft(request)
        self.metrics.preemptions += 1

    def _is_live(self, request: Request, epoch: int) -> bool:
        return request.status is Status.RUNNING and request.epoch == epoch

    def _retire(self, request: Request, verdict: VerdictArrays, index: int, *, is_round: bool) -> Progress:
        steps = read_steps(request, verdict, index, is_round=is_round)
        if request.first_token is None:
            request.first_token = self._clock()
        token_ids, logprobs = append_steps(request, steps, self.metrics.stats)
        # The last token is emitted and not in the cache.
        self._rows.check_holds(request, request.known_len - 1)
        finish = FINISH_REASONS.get(steps[-1].finish)
        if finish is not None:
            self._end(request, finish)
            request.stop_reason = token_ids[-1] if finish == "stop" else None
        return Progress(request, token_ids, logprobs, finish)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finishes a request, wherever it is."""
        if request.status is Status.RUNNING:
            self._release(request)
        elif request.budget:  # a budget of 0 is never queued
            self._waiting.remove(request)
        del self._requests[request.id]
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.finished = self._clock()
        self.metrics.finished += 1

    def _release(self, request: Request) -> None:
        """Takes row and pages away; what is in flight for them is no longer of interest."""
        self._rows.release(request)
        self._running.remove(request)
        request.prefill_ids, request.prefilled, request.prefill_in_flight, request.in_flight = [], 0, False, 0
        request.num_adopted = request.num_named = 0
