"""A device in plain Python for tests of the host: it keeps tokens in pages and draws the next one from all of them.

A page that is read by the wrong request, written too late or too small changes the tokens, so comparing outputs with
`plain_outputs` checks the scheduler's books.
"""

import collections
import random
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from jaxspec.batches import LENGTH, RUNNING, STOP
from jaxspec.config import SamplingParams
from jaxspec.pages import PagePool
from jaxspec.request import Request
from jaxspec.scheduler import DecodeBatch, Limits, PrefillBatch, PrefillChunk, Progress, Scheduler, VerdictArrays

VOCAB = 50


def make_request(name: str, prompt: list[int], budget: int, stop_ids: tuple[int, ...] = (), **params) -> Request:
    return Request(
        id=name,
        prompt_index=0,
        index=0,
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=None, **params),
        seed=len(prompt) + 7 * budget,
        budget=budget,
        stop_ids=stop_ids,
    )


def next_token(request: Request, context: list[int], min_len: int) -> int:
    """The one token that follows `context`; never a stop below `min_len`."""
    state = request.seed + 1
    for token in context:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
    for shift in range(VOCAB):
        token = ((state >> 33) + shift) % VOCAB
        if len(context) >= min_len or token not in request.stop_ids:
            return token
    raise AssertionError("every token is a stop")


def plain_outputs(request: Request) -> tuple[list[int], str]:
    """Outputs and finish reason of plain decoding, one token at a time."""
    outputs: list[int] = []
    while len(outputs) < request.budget:
        outputs.append(next_token(request, request.prompt_ids + outputs, request.min_len))
        if outputs[-1] in request.stop_ids:
            return outputs, "stop"
    return outputs, "length"


class Row:
    """One row of the device state, as `prefill` left it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seq_len = 0
        self.bonus = -1
        self.remaining = 0
        self.min_len = 0
        self.active = False


class SimulatedDevice:
    """Runs batches in the order they come. `accept()` gives how many drafts a round accepts, 0..path_len - 1."""

    def __init__(self, limits: Limits, page_size: int, accept: Callable[[], int]) -> None:
        self.limits = limits
        self.page_size = page_size
        self.accept = accept
        self.cells: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.following: dict[tuple[int, int], int] = {}  # likewise -> the token after it, as a draft's pool has it
        self.rows: list[Row | None] = [None] * limits.max_running

    def prefill(self, batch: PrefillBatch, pages: list[list[int]]) -> VerdictArrays:
        verdict = self._verdict(1, batch.num_rows, 1)
        assert len({chunk.row for chunk in batch.chunks}) == len(batch.chunks) <= batch.num_rows
        for index, chunk in enumerate(batch.chunks):
            if chunk.is_first:
                self.rows[chunk.row] = Row(chunk.request)
                self._adopt(chunk, pages[index])
            row = self.rows[chunk.row]
            assert row is not None
            assert row.request is chunk.request
            assert row.seq_len == chunk.start
            assert 0 < len(chunk.tokens) <= batch.chunk_len
            for token, following in zip(chunk.tokens, [*chunk.tokens[1:], chunk.next_token]):
                self._write(row, pages[index], token, following)
            if chunk.is_last:
                assert chunk.next_token == -1
                row.remaining, row.min_len, row.active = chunk.remaining, chunk.min_len, True
                self._emit(row, pages[index], 1, verdict, 0, index)
        return verdict

    def _adopt(self, chunk: PrefillChunk, pages: list[int]) -> None:
        row = self.rows[chunk.row]
        assert row is not None
        row.seq_len = chunk.start
        assert self._read(row, pages) == chunk.adopted
        cells = [self._cell(pages, position) for position in range(chunk.start)]
        assert [self.following[cell] for cell in cells] == [*chunk.adopted[1:], *chunk.tokens[:1]][: chunk.start]

    def decode(self, batch: DecodeBatch, pages: list[list[int]]) -> VerdictArrays:
        rounds, path_len = self.limits.rounds_per_dispatch, self.limits.path_len
        verdict = self._verdict(rounds, batch.num_rows, path_len)
        assert len({entry.row for entry in batch.entries}) == len(batch.entries) <= batch.num_rows
        for r in range(rounds):
            for index, entry in enumerate(batch.entries):
                row = self.rows[entry.row]
                assert row is not None
                assert row.request is entry.request
                if row.active:
                    self._round(row, pages[index], verdict, r, index)
        return verdict

    def _round(self, row: Row, pages: list[int], verdict: VerdictArrays, r: int, index: int) -> None:
        assert verdict.accepted is not None
        assert verdict.proposed is not None
        accepted = self.accept()
        count = self._emit(row, pages, accepted + 1, verdict, r, index)
        verdict.accepted[r, index] = min(accepted, count)
        verdict.proposed[r, index] = self.limits.path_len - 1

    def _emit(self, row: Row, pages: list[int], most: int, verdict: VerdictArrays, r: int, index: int) -> int:
        """Emits up to `most` tokens, up to the first stop; the last one is not written."""
        finish, count = RUNNING, 0
        while count < most and finish == RUNNING:
            if row.bonus >= 0:
                self._write(row, pages, row.bonus)
            row.bonus = next_token(row.request, self._read(row, pages), row.min_len)
            self.following[self._cell(pages, row.seq_len - 1)] = row.bonus
            verdict.tokens[r, index, count] = row.bonus
            count += 1
            row.remaining -= 1
            if row.bonus in row.request.stop_ids:
                finish = STOP
            elif row.remaining == 0:
                finish = LENGTH
        row.active = finish == RUNNING
        verdict.counts[r, index], verdict.finish[r, index] = count, finish
        return count

    def _write(self, row: Row, pages: list[int], token: int, following: int = -1) -> None:
        assert row.seq_len < len(pages) * self.page_size, "written beyond the reserved pages"
        cell = self._cell(pages, row.seq_len)
        self.cells[cell], self.following[cell] = token, following
        row.seq_len += 1

    def _read(self, row: Row, pages: list[int]) -> list[int]:
        return [self.cells[self._cell(pages, position)] for position in range(row.seq_len)]

    def _cell(self, pages: list[int], position: int) -> tuple[int, int]:
        return pages[position // self.page_size], position % self.page_size

    def _verdict(self, rounds: int, num_rows: int, path_len: int) -> VerdictArrays:
        """Garbage where nothing is emitted, zero counts."""
        counts, finish, accepted, proposed = (np.zeros((rounds, num_rows), np.int32) for _ in range(4))
        tokens = np.full((rounds, num_rows, path_len), -99, np.int32)
        return VerdictArrays(tokens, counts, finish, accepted, proposed)


class SimulatedEngine:
    """The loop of an engine: dispatches at once, retires once more than `lag()` dispatches are in flight."""

    def __init__(
        self, limits: Limits, pool: PagePool, accept: Callable[[], int], lag: Callable[[], int] | None = None
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.scheduler = Scheduler(limits, pool)
        self.device = SimulatedDevice(limits, pool.page_size, accept)
        self.lag = lag or (lambda: limits.rounds_in_flight)
        self.in_flight: deque[tuple[PrefillBatch | DecodeBatch, VerdictArrays]] = deque()
        self.shapes: set[tuple[int, int]] = set()  # of the prefills

    def step(self) -> Iterator[Progress]:
        """Plans and dispatches a prefill and a decode, then retires what is due."""
        prefill = self.scheduler.plan_prefill()
        if prefill is not None:
            self.shapes.add((prefill.num_rows, prefill.chunk_len))
            pages = [list(self.scheduler.page_row(chunk.request)) for chunk in prefill.chunks]
            self.in_flight.append((prefill, self.device.prefill(prefill, pages)))
        decode = self.scheduler.plan_decode()
        if decode is not None:
            pages = [list(self.scheduler.page_row(entry.request)) for entry in decode.entries]
            self.in_flight.append((decode, self.device.decode(decode, pages)))
        self.check_books()
        due = self.lag() if prefill or decode else 0
        while len(self.in_flight) > due:
            batch, verdict = self.in_flight.popleft()
            if isinstance(batch, PrefillBatch):
                yield from self.scheduler.retire_prefill(batch, verdict)
            else:
                yield from self.scheduler.retire_decode(batch, verdict)

    def run(self, requests: list[Request], max_steps: int = 10_000) -> None:
        """Adds all requests and runs until they are finished."""
        for request in requests:
            self.scheduler.add(request)
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            for _ in self.step():
                pass
        raise AssertionError(f"{self.scheduler.num_running} running, {self.scheduler.num_waiting} waiting: no end")

    def check_books(self) -> None:
        """Each row has one owner, and each page as many as the pool says; who shares a page has its tokens in it."""
        running = self.scheduler._running
        owners = collections.Counter(page for request in running for page in request.pages)
        assert [owners[page] for page in range(self.pool.num_pages)] == self.pool._owners
        assert len(owners) == self.pool.num_pages - self.pool.num_free
        for request in running:
            if not self.limits.prefix_caching:
                assert all(owners[page] == 1 for page in request.pages)
        rows = [request.row for request in running]
        assert None not in rows
        assert len(set(rows)) == len(rows)


def make_limits(**sizes) -> Limits:
    defaults = {
        "max_running": 4,
        "max_model_len": 128,
        "path_len": 4,
        "row_buckets": (1, 2, 4),
        "chunk_buckets": (4, 8, 16),
        "max_chunk": 16,
        "prefill_rows": 2,
    }
    return Limits(**(defaults | sizes))


def random_requests(rng: random.Random, count: int, max_len: int) -> list[Request]:
    """Requests of mixed lengths, budgets and stop tokens, none longer than `max_len`."""
    requests: list[Request] = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, max_len // 2))]
        budget = rng.choice([1, 2, rng.randint(1, max_len - len(prompt))])
        stop_ids = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 3])))
        min_tokens = rng.choice([0, 0, rng.randint(0, budget)])
        requests.append(make_request(f"r{i}", prompt, budget, stop_ids, min_tokens=min_tokens))
    return requests


def make_scheduler(num_pages: int = 64, page_size: int = 4, **sizes) -> Scheduler:
    return Scheduler(make_limits(**sizes), PagePool(num_pages, page_size))


def verdict_of(tokens: list[int], finish: int = RUNNING, accepted: int = 0, proposed: int = 3) -> VerdictArrays:
    """A verdict of one round and one row."""
    count, ended, right, made = (np.array([[n]]) for n in (len(tokens), finish, accepted, proposed))
    return VerdictArrays(np.array([[tokens]]), count, ended, right, made)


def prefilled(scheduler: Scheduler, request: Request, token: int = 1) -> None:
    """Adds a request and runs its prefill."""
    scheduler.add(request)
    scheduler.retire_prefill(take_prefill(scheduler), verdict_of([token]))


def take_prefill(scheduler: Scheduler) -> PrefillBatch:
    batch = scheduler.plan_prefill()
    assert batch is not None
    return batch


def take_decode(scheduler: Scheduler) -> DecodeBatch:
    batch = scheduler.plan_decode()
    assert batch is not None
    return batch
