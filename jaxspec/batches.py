"""What the scheduler and the engine hand each other: batches to dispatch, verdicts to retire."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.outputs import FinishReason, TokenLogprobs
from jaxspec.pages import PagePool
from jaxspec.request import Request

# Codes of `VerdictArrays.finish`.
RUNNING, STOP, LENGTH = 0, 1, 2
FINISH_REASONS: dict[int, FinishReason] = {STOP: "stop", LENGTH: "length"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The sizes the scheduler plans within.

    Attributes:
        max_running: rows of the device state.
        max_queued: requests that may wait for a row; None is no limit.
        max_model_len: most tokens of prompt and output together.
        path_len: most tokens one round emits for a row (num_steps + 1; 1 for plain decoding).
        rounds_per_dispatch: rounds one decode dispatch runs.
        rounds_in_flight: decode dispatches the engine leaves unretired while it plans the next.
        row_buckets: sizes of decode batches, ascending; the last holds `max_running`.
        chunk_buckets: lengths of prefill chunks, ascending; the last holds `max_chunk`.
        max_chunk: most tokens of one prefill batch (`chunked_prefill_size`, or `max_model_len` for whole prompts).
        prefill_rows: rows of a prefill batch that is not of one row.
        prefix_caching: whether a request takes over the pages of an earlier one that began alike.

    Raises:
        ValueError: a size is out of range or the buckets do not cover it.
    """

    max_running: int
    max_queued: int | None = None
    max_model_len: int
    path_len: int
    rounds_per_dispatch: int = 1
    rounds_in_flight: int = 1
    row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]
    max_chunk: int
    prefill_rows: int = 1
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        for name in ("max_running", "max_model_len", "path_len", "rounds_per_dispatch", "max_chunk", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name, largest in {"row_buckets": self.max_running, "chunk_buckets": self.max_chunk}.items():
            buckets = getattr(self, name)
            if not buckets or buckets[0] < 1 or any(a >= b for a, b in itertools.pairwise(buckets)):
                raise ValueError(f"{name}={buckets} must be ascending sizes of at least 1.")
            if buckets[-1] < largest:
                raise ValueError(f"{name}={buckets} must end with at least {largest}; add it.")

    @property
    def growth(self) -> int:
        """Most tokens that one decode dispatch adds to a row."""
        return self.rounds_per_dispatch * self.path_len

    @property
    def group_chunk(self) -> int:
        """Longest chunk of a prefill batch with several rows; 0 when there is none."""
        fitting = [chunk for chunk in self.chunk_buckets if self.prefill_rows * chunk <= self.max_chunk]
        return fitting[-1] if fitting and self.prefill_rows > 1 else 0

    @property
    def prefill_shapes(self) -> list[tuple[int, int]]:
        """Every (num_rows, chunk_len) that `plan_prefill` may ask for: what a warm-up has to compile."""
        alone = self.chunk_buckets[: bisect.bisect_left(self.chunk_buckets, self.max_chunk) + 1]
        grouped = [chunk for chunk in alone if chunk <= self.group_chunk]
        return [(1, chunk) for chunk in alone] + [(self.prefill_rows, chunk) for chunk in grouped]

    def check_fits(self, request: Request, pool: PagePool) -> None:
        """Raises ValueError if a request could outgrow the context, or the pool even when it runs alone."""
        if request.max_len > self.max_model_len:
            raise ValueError(
                f"request {request.id} may reach {request.max_len} tokens, more than "
                f"max_model_len={self.max_model_len}; shorten its prompt or set max_tokens lower."
            )
        pages = pool.pages_for(request.max_len)
        if request.budget and pages > pool.num_pages:
            raise ValueError(
                f"request {request.id} may reach {request.max_len} tokens and needs {pages} pages of {pool.page_size} "
                f"tokens; the pool has {pool.num_pages}. Set max_tokens lower, or max_total_tokens to at least "
                f"{pages * pool.page_size}."
            )

    def check_queue(self, num_running: int, num_waiting: int) -> None:
        """Raises ValueError if one more request finds the queue full; those that will get a free row do not queue."""
        if self.max_queued is not None and num_waiting >= self.max_queued + self.max_running - num_running:
            raise ValueError(
                f"the queue is full: {num_running} requests run, {num_waiting} wait, "
                f"max_queued_requests={self.max_queued}; send fewer at once or set it higher."
            )


def bucket_of(buckets: Sequence[int], size: int) -> int:
    """Smallest bucket that holds `size`."""
    return buckets[bisect.bisect_left(buckets, size)]


class PrefillChunk(NamedTuple):
    """A part of the sequence of one request."""

    request: Request
    epoch: int
    row: int
    start: int  # absolute position of tokens[0]
    tokens: list[int]
    next_token: int  # first token of the next chunk; -1 when this is the last, where the sampled token takes its place
    is_last: bool  # the row emits one token and becomes active
    remaining: int  # tokens it may still emit, that one included
    min_len: int  # a token at an absolute position below this may not be a stop
    adopted: list[int]  # tokens before the first chunk that are in pages already, and that the row has to know

    @property
    def is_first(self) -> bool:
        """Whether the row is taken anew: its state is to be reset."""
        return self.start == len(self.adopted)


class PrefillBatch(NamedTuple):
    chunks: tuple[PrefillChunk, ...]
    num_rows: int  # bucket, >= len(chunks)
    chunk_len: int  # bucket, >= every len(chunk.tokens)


class Entry(NamedTuple):
    request: Request
    epoch: int
    row: int


class DecodeBatch(NamedTuple):
    entries: tuple[Entry, ...]  # oldest request first
    num_rows: int  # bucket, >= len(entries)


class EchoArrays(NamedTuple):
    """Log-probabilities of what follows each token of a batch of chunks, on the host; see `VerdictArrays`."""

    logprobs: np.ndarray  # [B, C] float32
    top_ids: np.ndarray  # [B, C, K], best first
    top_logprobs: np.ndarray  # [B, C, K]


class VerdictArrays(NamedTuple):
    """What a dispatch emitted, on the host. Index B is the position in the batch (`chunks`, `entries`), not the row.

    R is `rounds_per_dispatch` and P `path_len`; both are 1 for a prefill. Positions at and beyond `counts` are
    garbage and are not read.
    """

    tokens: np.ndarray  # [R, B, P] int32
    counts: np.ndarray  # [R, B] tokens emitted; 0 for a row that is not active
    finish: np.ndarray  # [R, B] RUNNING, STOP or LENGTH after this round
    accepted: np.ndarray | None = None  # [R, B] drafts among the emitted tokens; not read for a prefill
    proposed: np.ndarray | None = None  # [R, B] drafts that were verified; not read for a prefill
    logprobs: np.ndarray | None = None  # [R, B, P] float32; read for requests that ask for logprobs only
    top_ids: np.ndarray | None = None  # [R, B, P, K], best first
    top_logprobs: np.ndarray | None = None  # [R, B, P, K]
    echo: EchoArrays | None = None  # of a prefill; read for requests that ask for prompt_logprobs only


class Progress(NamedTuple):
    """What one retired dispatch added to one request."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # None when not asked for
    finish: FinishReason | None
