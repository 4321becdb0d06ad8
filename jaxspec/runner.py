"""The device side of an engine: owns the donated state, and dispatches steps without waiting for them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draft.base import CacheShape
from jaxspec.kv_cache import Paged
from jaxspec.state import NO_WIDTHS, Rows, Sampling, State, Widths
from jaxspec.step import Chunks, Echo, Params, Program, RoundView, compiled_steps, preview_step
from jaxspec.verify import Verdict


class RunnerShape(NamedTuple):
    """Sizes of the device state."""

    num_rows: int
    max_model_len: int
    num_stop_ids: int
    num_pages: int
    page_size: int
    dtype: jnp.dtype
    attention_backend: str = "xla"
    widths: Widths = NO_WIDTHS

    @property
    def table_width(self) -> int:
        """Pages that one row may own."""
        return -(-self.max_model_len // self.page_size)


class Warmup(NamedTuple):
    """One program to compile: a prefill of `chunk_len` tokens, or a decode where that is None."""

    num_rows: int
    chunk_len: int | None


class Runner:
    """Dispatches prefills and rounds in order. Each returns its verdict's arrays while the device still works.

    Args:
        program: what is static.
        params: weights; not donated.
        shape: sizes of the state.
    """

    def __init__(self, program: Program, params: Params, shape: RunnerShape):
        self.program, self.params, self.shape = program, params, shape
        self._is_closed = False
        self._preview: Callable[..., RoundView] | None = None
        self._prefill, self._decode = compiled_steps(program)
        # Made by a compiled function, so that the first dispatch sees the same kind of arrays as all later ones.
        self._state = jax.jit(self._init)()

    def _init(self) -> State:
        shape, program = self.shape, self.program
        pool = CacheShape(shape.num_rows, shape.num_pages, shape.page_size, shape.dtype, shape.attention_backend)
        caches = program.target.init_cache(
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            num_rows=pool.num_rows,
            dtype=pool.dtype,
            backend=pool.attention_backend,
        )
        draft = program.draft.init(pool)
        rows = Rows.zeros(shape.num_rows, shape.max_model_len, shape.num_stop_ids, shape.widths)
        return State(rows, caches, draft)

    @property
    def keeps_all_in_pages(self) -> bool:
        """Whether nothing is kept of a row's tokens but their pages, so that another row may read on from these."""
        is_paged = lambda cache: isinstance(cache, Paged)  # noqa: E731
        return all(map(is_paged, jax.tree.leaves((self._state.caches, self._state.draft.caches), is_leaf=is_paged)))

    @property
    def state(self) -> State:
        """The state after everything dispatched so far; valid until the next dispatch donates it."""
        return self._state

    def empty_table(self, num_rows: int) -> Any:
        """A page table for a dispatch: NumPy int32 [num_rows, pages], all -1."""
        return np.full((num_rows, self.shape.table_width), -1, np.int32)

    def empty_rows(self, num_rows: int) -> Any:
        """Row ids for a dispatch: NumPy int32 [num_rows], all padding."""
        return np.full(num_rows, self.shape.num_rows, np.int32)

    def empty_chunks(self, num_rows: int, chunk_len: int) -> Chunks:
        """A prefill of padding only, in NumPy arrays to be filled in; fresh ones, because a dispatch may alias them."""

        def ints(*size: int) -> Any:
            return np.zeros((num_rows, *size), np.int32)

        return Chunks(
            row_ids=self.empty_rows(num_rows),
            table=self.empty_table(num_rows),
            tokens=ints(chunk_len),
            length=ints(),
            start=ints(),
            next_token=ints(),
            is_last=ints().astype(bool),
            remaining=ints(),
            # Never made on the device: reading it back would wait for the rounds in flight.
            sampling=Sampling.zeros(num_rows, self.shape.num_stop_ids, self.shape.widths, xp=np),
        )

    def adopt(self, row: int, tokens: Sequence[int]) -> None:
        """Lets a row know tokens whose keys and values are in pages already: its first chunk begins behind them."""
        padded = np.zeros(self.shape.max_model_len, np.int32)
        padded[: len(tokens)] = tokens
        self._state = self._state._replace(rows=_adopt(self._state.rows, np.int32(row), padded))

    def prefill(self, chunks: Chunks) -> tuple[Verdict, Echo]:
        """Dispatches one chunk for each row."""
        self._state, verdict, echo = self._prefill(self.params, state=self._state, chunks=chunks)
        return _start_copy(verdict), echo  # which few requests want: it is copied when it is read

    def decode(self, row_ids: np.ndarray, table: np.ndarray) -> Verdict:
        """Dispatches `program.rounds` rounds for the named rows."""
        self._state, verdict = self._decode(self.params, state=self._state, row_ids=row_ids, table=table)
        return _start_copy(verdict)

    def preview(self, row_ids: np.ndarray, table: np.ndarray) -> list[RoundView]:
        """What the next round of each named row would do, on the host; nothing is changed."""
        if self._preview is None:
            self._preview = jax.jit(functools.partial(preview_step, self.program))
        leaves, treedef = jax.tree.flatten(self._preview(self.params, self._state, row_ids, table))
        return [jax.tree.unflatten(treedef, row) for row in zip(*map(np.asarray, leaves))]

    def warm_up(self, programs: list[Warmup]) -> Iterator[Warmup]:
        """Compiles programs, prefills first, and runs each once; yields each when it is done.

        Row 0 gets a prompt of one token and no pages, so that the rounds really run (their first run builds what the
        backend left for later, measured 0.2 s) and what they commit is dropped. The first real prefill of the row
        resets it.
        """
        self.adopt(self.shape.num_rows, [])
        for program in sorted(programs, key=lambda program: program.chunk_len is None):
            if program.chunk_len is None:
                row_ids = self.empty_rows(program.num_rows)
                row_ids[0] = 0
                verdict = self.decode(row_ids, self.empty_table(program.num_rows))
            else:
                verdict, _ = self.prefill(self._practice(program.num_rows, program.chunk_len))
            jax.block_until_ready(verdict)
            yield program

    def _practice(self, num_rows: int, chunk_len: int) -> Chunks:
        """A prefill that makes row 0 active, with a budget that no warm-up uses up."""
        chunks: Any = self.empty_chunks(num_rows, chunk_len)
        chunks.row_ids[0], chunks.length[0], chunks.is_last[0] = 0, 1, True
        chunks.remaining[0] = np.iinfo(np.int32).max // 2
        return chunks

    def close(self) -> None:
        """Deletes the state, and lets go of the weights; the runner is of no use afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        jax.tree.map(lambda leaf: leaf.delete(), self._state)
        del self.params

    def cache_bytes(self) -> int:
        """Bytes of all paged caches."""
        leaves = jax.tree.leaves((self._state.caches, self._state.draft.caches))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


_adopt = jax.jit(Rows.adopt, donate_argnums=0)


def _start_copy(verdict: Verdict) -> Verdict:
    for leaf in jax.tree.leaves(verdict):
        leaf.copy_to_host_async()
    return verdict
