"""The engine: the loop that keeps the device busy while the host does its books. The one file that knows both sides."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.batches import DecodeBatch, EchoArrays, Entry, Limits, PrefillBatch, Progress, VerdictArrays
from jaxspec.config import EngineConfig
from jaxspec.fill import fill_chunk
from jaxspec.metrics import EngineMetrics
from jaxspec.outputs import FinishReason
from jaxspec.pages import PagePool
from jaxspec.plan import SpecPlan
from jaxspec.request import Request
from jaxspec.runner import Runner, Warmup
from jaxspec.scheduler import Scheduler
from jaxspec.step import Echo, RoundView
from jaxspec.verify import Verdict

# Rows of a prefill batch that is not of one row.
PREFILL_ROWS = 4


def make_limits(plan: SpecPlan, settings: EngineConfig) -> Limits:
    """Buckets and sizes the scheduler plans within."""
    return Limits(
        max_running=plan.max_running_requests,
        max_queued=settings.max_queued_requests,
        max_model_len=plan.max_model_len,
        path_len=plan.path_len,
        rounds_per_dispatch=plan.rounds_per_dispatch,
        rounds_in_flight=plan.rounds_in_flight,
        row_buckets=plan.decode_row_buckets,
        chunk_buckets=plan.prefill_chunk_buckets,
        max_chunk=plan.chunked_prefill_size,
        prefill_rows=min(PREFILL_ROWS, plan.max_running_requests),
        prefix_caching=plan.prefix_caching,
    )


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """Work the device has been given and the host has not read."""

    batch: PrefillBatch | DecodeBatch
    verdict: Verdict
    echo: Echo | None = None  # of a prefill


class Engine:
    """Continuous batching over the rows of a `Runner`.

    `step` dispatches what can be dispatched and then reads what is due: everything but the last `rounds_in_flight`
    dispatches. With 0 (v1) the device idles while the host works; with 1 (v2) it runs the next round meanwhile.

    An exception within a step, an interrupt for instance, leaves the books and the device at odds. The engine is of no
    use then, and says so at every later call: it never goes on with wrong tokens. A closed engine does the same.

    Args:
        runner: the device.
        plan: the resolved plan.
        settings: what the plan was resolved from.
    """

    def __init__(self, runner: Runner, plan: SpecPlan, settings: EngineConfig):
        self.plan, self.limits = plan, make_limits(plan, settings)
        self._runner = runner
        self._scheduler = Scheduler(self.limits, PagePool(plan.num_pages, plan.page_size))
        self._scheduler.metrics.simulate_accept_len = plan.simulate_accept_len
        self._scheduler.metrics.exactness = plan.exactness
        self._in_flight: deque[_Dispatch] = deque()
        self._unusable: str | None = None  # why

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since the engine was made."""
        return self._scheduler.metrics

    @property
    def runner(self) -> Runner:
        """The device side."""
        return self._runner

    @property
    def num_free_pages(self) -> int:
        """Pages that no request owns, those among them that are kept for what is in them."""
        return self._scheduler.pool.num_free

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished, or a dispatch not read."""
        return self._scheduler.has_work or bool(self._in_flight)

    @property
    def is_usable(self) -> bool:
        """Whether it is neither closed nor failed in a step."""
        return self._unusable is None

    def warmup_programs(self) -> list[Warmup]:
        """Every program that a dispatch may need."""
        prefills = [Warmup(rows, chunk) for rows, chunk in self.limits.prefill_shapes]
        return prefills + [Warmup(rows, None) for rows in self.limits.row_buckets]

    def check(self, request: Request) -> None:
        """Raises ValueError if a request could never run; see `Limits.check_fits`."""
        self._check_usable()
        self.limits.check_fits(request, self._scheduler.pool)

    def add(self, request: Request) -> Progress | None:
        """Queues a request; see `Scheduler.add`."""
        self._check_usable()
        return self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request with what is known of it; False when there is none of this id, or the engine is of no use."""
        return self._unusable is None and self._scheduler.abort(request_id)

    def finish(self, request: Request, reason: FinishReason, keep: int, stop_reason: str | None) -> None:
        """Ends a request from the host, cutting its output to `keep` tokens (a stop string was found)."""
        self._check_usable()
        self._scheduler.finish(request, reason, keep=keep, stop_reason=stop_reason)

    def close(self) -> None:
        """Drops what is in flight and frees the device memory; the engine is of no use afterwards."""
        self._unusable = "is closed"
        self._in_flight.clear()
        self._runner.close()

    @contextlib.contextmanager
    def intact(self) -> Iterator[None]:
        """A block that has to run to its end: an exception in it makes the engine unusable.

        Raises:
            RuntimeError: the engine is unusable already; the message says why.
        """
        self._check_usable()
        try:
            yield
        except BaseException as error:
            self._unusable = self._unusable or f"failed in a step ({type(error).__name__}: {error})"
            raise

    def step(self) -> list[Progress]:
        """Dispatches a prefill and a decode where there is one, then reads what is due.

        Raises:
            RuntimeError: the engine is closed, or failed in an earlier step.
        """
        with self.intact():
            return self._step()

    def preview(self) -> list[tuple[Request, RoundView]]:
        """What the next round of each running request would do, as NumPy arrays of its row.

        Raises:
            RuntimeError: a round is in flight (v2), so that the next one is not known yet; or the engine is unusable.
        """
        self._check_usable()
        if self._in_flight:
            raise RuntimeError("a round is in flight; set disable_overlap_schedule=True to look at the next one.")
        entries = self._scheduler.decodable()
        views = self._runner.preview(*self._decode_arrays(entries, self.limits.max_running))
        return [(entry.request, view) for entry, view in zip(entries, views)]

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(f"this LLM {self._unusable}; make a new one.")

    def _step(self) -> list[Progress]:
        dispatched = [self._prefill(), self._decode()]
        if not any(dispatched) and not self._in_flight and self._scheduler.has_work:
            running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
            raise RuntimeError(f"nothing can run: {running} requests have rows, {waiting} wait.")
        keep = self.plan.rounds_in_flight if any(dispatched) else 0
        progress: list[Progress] = []
        while len(self._in_flight) > keep:
            progress += self._retire(self._in_flight.popleft())
            if not any(dispatched):
                break  # what was just read may have made something dispatchable
        return progress

    def _prefill(self) -> bool:
        batch = self._scheduler.plan_prefill()
        if batch is None:
            return False
        chunks = self._runner.empty_chunks(batch.num_rows, batch.chunk_len)
        for index, chunk in enumerate(batch.chunks):
            fill_chunk(chunks, index, chunk)
            _fill_table(chunks.table, index, self._scheduler.page_row(chunk.request))
            if chunk.adopted:
                self._runner.adopt(chunk.row, chunk.adopted)
        self._in_flight.append(_Dispatch(batch, *self._runner.prefill(chunks)))
        return True

    def _decode(self) -> bool:
        batch = self._scheduler.plan_decode()
        if batch is None:
            return False
        row_ids, table = self._decode_arrays(batch.entries, batch.num_rows)
        self._in_flight.append(_Dispatch(batch, self._runner.decode(row_ids, table)))
        return True

    def _decode_arrays(self, entries: Sequence[Entry], num_rows: int) -> tuple[Any, Any]:
        """Row ids [num_rows] and page table [num_rows, pages] of a decode."""
        row_ids, table = self._runner.empty_rows(num_rows), self._runner.empty_table(num_rows)
        for index, entry in enumerate(entries):
            row_ids[index] = entry.row
            _fill_table(table, index, self._scheduler.page_row(entry.request))
        return row_ids, table

    def _retire(self, dispatch: _Dispatch) -> list[Progress]:
        """Waits for a dispatch, and lets the scheduler take in what it emitted."""
        batch, metrics = dispatch.batch, self._scheduler.metrics
        started = time.monotonic()
        verdict = read_verdict(dispatch)
        waited = time.monotonic() - started
        if isinstance(batch, PrefillBatch):
            metrics.prefill_seconds += waited
            return self._scheduler.retire_prefill(batch, verdict)
        metrics.decode_seconds += waited
        return self._scheduler.retire_decode(batch, verdict)


def read_verdict(dispatch: _Dispatch) -> VerdictArrays:
    """The verdict on the host, with a leading axis of rounds; logprobs only where a request asked for them."""
    batch, verdict = dispatch.batch, dispatch.verdict
    members = batch.chunks if isinstance(batch, PrefillBatch) else batch.entries
    wanted = any(member.request.params.logprobs is not None for member in members)
    echo_wanted = dispatch.echo is not None and any(member.request.wants_prompt_logprobs for member in members)

    def read(leaf) -> np.ndarray:
        array = np.asarray(leaf)
        return array[None] if isinstance(batch, PrefillBatch) else array

    return VerdictArrays(
        tokens=read(verdict.tokens),
        counts=read(verdict.count),
        finish=read(verdict.finish),
        accepted=read(verdict.accepted),
        proposed=read(verdict.proposed),
        logprobs=read(verdict.logprobs) if wanted else None,
        top_ids=read(verdict.top_ids) if wanted else None,
        top_logprobs=read(verdict.top_logprobs) if wanted else None,
        echo=EchoArrays(*map(np.asarray, dispatch.echo or ())) if echo_wanted else None,
    )


def _fill_table(table: Any, index: int, pages: list[int]) -> None:
    table[index, : len(pages)] = pages
