"""How much runs at once: rows, the context, the KV pool, and the shapes that programs are compiled for."""

from typing import NamedTuple

from jaxspec.config import EngineConfig
from jaxspec.plan import OVERRIDE, WARNING, Note, TargetInfo

MAX_RUNNING_REQUESTS = 48
# Shortest automatic chunk of a prompt that prefill is compiled for.
SMALLEST_CHUNK = 64
# How many times the most that can come the largest bucket may be.
MAX_PADDING = 4


class Sizes(NamedTuple):
    """The sizes of a plan; the fields are those of `SpecPlan`."""

    max_running_requests: int
    max_model_len: int
    page_size: int
    num_pages: int
    chunked_prefill_size: int
    decode_row_buckets: tuple[int, ...]
    prefill_chunk_buckets: tuple[int, ...]


def choose_sizes(
    engine: EngineConfig,
    target: TargetInfo,
    notes: list[Note],
    *,
    speculates: bool,
    page_size_default: int,
    max_total_tokens_default: int,
) -> Sizes:
    """Returns the sizes, with a note for each that the user left open or that had to change.

    Raises:
        ValueError: the context is longer than the target's, or no bucket holds the longest chunk.
    """
    rows = _max_running_requests(engine, speculates, notes)
    page_size = engine.page_size
    if page_size is None:
        page_size = page_size_default
        notes.append(Note("page_size", None, page_size, "automatic on this device; set page_size"))
    asked = engine.max_total_tokens
    num_pages = -(-(max_total_tokens_default if asked is None else asked) // page_size)
    total = num_pages * page_size
    length = min(target.max_position, total) if engine.max_model_len is None else engine.max_model_len
    _note_pool(asked, total, page_size, rows, length, notes)
    _check_context(engine, target, total, length, notes)
    chunk = min(engine.chunked_prefill_size or length, length)
    return Sizes(
        rows,
        length,
        page_size,
        num_pages,
        chunk,
        _row_buckets(engine, rows, notes),
        _chunk_buckets(engine, chunk, length, notes),
    )


def num_rows(engine: EngineConfig) -> int:
    """How many requests run together: the same with and without speculation, so that the two compare like with like."""
    largest = MAX_RUNNING_REQUESTS if engine.decode_row_buckets is None else engine.decode_row_buckets[-1]
    return largest if engine.max_running_requests is None else engine.max_running_requests


def _max_running_requests(engine: EngineConfig, speculates: bool, notes: list[Note]) -> int:
    rows = num_rows(engine)
    if engine.max_running_requests is not None:
        return rows
    reason = "automatic, the same as under speculation; set max_running_requests"
    if engine.decode_row_buckets is not None:
        reason = "the largest of decode_row_buckets"
    elif speculates:
        reason = f"speculation runs at most {rows} requests together unless told; set max_running_requests"
    notes.append(Note("max_running_requests", None, rows, reason))
    return rows


def _note_pool(asked: int | None, total: int, page_size: int, rows: int, length: int, notes: list[Note]) -> None:
    if asked is None:
        has_all = rows * length <= total
        reason = f"enough for {rows} requests of {length} tokens" if has_all else "what the memory has room for"
        notes.append(Note("max_total_tokens", None, total, f"{reason}; set max_total_tokens"))
    elif asked != total:
        reason = f"rounded up to whole pages of page_size={page_size}; set max_total_tokens={total}"
        notes.append(Note("max_total_tokens", asked, total, reason, OVERRIDE))


def _check_context(engine: EngineConfig, target: TargetInfo, total: int, length: int, notes: list[Note]) -> None:
    limit = target.max_position
    if engine.max_model_len is None:
        reason = "the target's own context" if length == limit else "what the KV pool holds; set max_total_tokens"
        notes.append(Note("max_model_len", None, length, reason))
    elif length > limit:
        raise ValueError(
            f"max_model_len={length} is more than the {limit} positions the target was built for; "
            f"set it to at most {limit}."
        )
    elif length > total:
        reason = f"the KV pool holds {total} tokens, and longer requests are refused; set max_total_tokens={length}"
        notes.append(Note("max_model_len", length, length, reason, WARNING))


def _row_buckets(engine: EngineConfig, rows: int, notes: list[Note]) -> tuple[int, ...]:
    if engine.decode_row_buckets is not None:
        given = tuple(engine.decode_row_buckets)
        _check_padding("decode_row_buckets", given, rows, max(MAX_PADDING * rows, SMALLEST_CHUNK))
        return given
    buckets = _ladder(1, rows, factor=2)
    reason = "powers of two up to max_running_requests; set decode_row_buckets"
    notes.append(Note("decode_row_buckets", None, buckets, reason))
    return buckets


def _chunk_buckets(engine: EngineConfig, chunk: int, length: int, notes: list[Note]) -> tuple[int, ...]:
    if engine.prefill_chunk_buckets is None:
        buckets = _ladder(SMALLEST_CHUNK, chunk, factor=4)
        reason = "in steps of four times up to the longest chunk of a prompt; set prefill_chunk_buckets"
        notes.append(Note("prefill_chunk_buckets", None, buckets, reason))
        return buckets
    buckets = tuple(engine.prefill_chunk_buckets)
    if buckets[-1] < chunk:
        raise ValueError(
            f"prefill_chunk_buckets={list(buckets)} ends below the {chunk} tokens of a prompt that "
            f"chunked_prefill_size=None computes in one step; add a bucket of at least {chunk}, or set "
            f"chunked_prefill_size={buckets[-1]}."
        )
    _check_padding("prefill_chunk_buckets", buckets, chunk, max(MAX_PADDING * chunk, SMALLEST_CHUNK, length))
    return buckets


def _check_padding(name: str, buckets: tuple[int, ...], needed: int, most: int) -> None:
    """Refuses buckets that nothing comes near to filling: memory and time would go into padding."""
    if buckets[-1] > most:
        raise ValueError(f"{name}={list(buckets)} holds {buckets[-1]} where {needed} are needed; set at most {most}.")


def _ladder(first: int, last: int, *, factor: int) -> tuple[int, ...]:
    """first, factor x first, ... and last: each is a program to compile, and its padding is computed in vain."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
