"""Answers the rows of a job by an LLM whose batch is kept full, and writes each answer when it is done."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.llm import LLM
from jaxspec.offline import openai_batch
from jaxspec.offline.job import Job
from jaxspec.offline.report import Totals
from jaxspec.offline.rows import Name, Reading, Row, name_of, read_row
from jaxspec.output_values import completion_values
from jaxspec.outputs import RequestOutput
from jaxspec.stream import ChunkStream

# Rows that are read ahead and put in order of their length.
SORTED_ROWS = 4096
# Answers are written together: a write that waits for the disk costs as much as a round.
_WRITE_SECONDS, _WRITE_ROWS = 0.25, 256
# Requests handed to the engine, as a multiple of those that run: one that ends is replaced in the same step.
_AHEAD = 2


class Generation:
    """The answering of a job. A row that cannot be answered gets an error for an answer.

    Args:
        llm: answers.
        job: which rows, and where the answers go.
        reading: how the rows are read.
        model: what responses of the OpenAI format name as their model.
        by_length: rows of like length run together, the longest first, instead of as they come.
        on_progress: called when answers were written.

    Attributes:
        totals: counts of this run.
    """

    def __init__(
        self,
        llm: LLM,
        job: Job,
        reading: Reading,
        *,
        model: str,
        by_length: bool = False,
        on_progress: Callable[[Totals], None] = lambda totals: None,
    ):
        self._llm, self._job, self._reading, self._model = llm, job, reading, model
        self._by_length, self._on_progress = by_length, on_progress
        self.totals = Totals(num_rows=job.num_rows, num_earlier=job.num_done)
        self._open: dict[str, tuple[Row, ChunkStream]] = {}
        self._unwritten: list[dict[str, Any]] = []
        self._last_write = time.monotonic()

    def run(self) -> Totals:
        """Answers every row that has no answer.

        Raises:
            OSError: the answers cannot be written; those that were stay, and a run that resumes goes on with them.
            RuntimeError: the engine failed; likewise.
        """
        rows = self._rows()
        most = _AHEAD * self._llm.plan.max_running_requests
        try:
            while self._fill(rows, most):
                self._step()
                self._write(only_when_due=True)
        finally:
            for _, stream in self._open.values():
                stream.close()
        self._write()
        self.totals.look(self._llm.metrics)
        return self.totals

    def _rows(self) -> Iterator[Row]:
        """Rows that can be asked; the others become errors."""
        waiting: deque[Row] = deque()
        for number, line in self._job.todo():
            try:
                waiting.append(read_row(line, number, self._reading))
            except (ValueError, TypeError) as error:
                self._fail(name_of(line, number), error)
                continue
            if not self._by_length:
                yield waiting.popleft()
            elif len(waiting) == SORTED_ROWS:
                yield from _longest_first(waiting)
        yield from _longest_first(waiting)

    def _fill(self, rows: Iterator[Row], most: int) -> bool:
        """Hands rows to the engine until it has enough; False when nothing is left to be answered."""
        while len(self._open) < most and (row := next(rows, None)) is not None:
            try:
                self._open[row.name.key] = row, self._llm.stream([row.prompt], [row.params])
            except (ValueError, TypeError) as error:
                self._fail(row.name, error)
        return bool(self._open)

    def _step(self) -> None:
        """Lets the engine run until the oldest row has something, and takes in what has ended."""
        for position, (key, (row, stream)) in enumerate(list(self._open.items())):
            try:
                chunks = stream.poll() or ([next(stream)] if position == 0 else [])
            except Exception as error:
                if not self._llm.engine.is_usable:
                    raise
                self._fail(row.name, error)
                del self._open[key]
                continue
            output = chunks[-1].output if chunks else None
            if output is not None:
                self._unwritten.append(self._answer(row, output))
                self.totals.add(output)
                stream.close()
                del self._open[key]

    def _answer(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        if row.kind is not None:
            name, tokenizer = row.name.key, self._llm.tokenizer
            return openai_batch.response_row(name, row.kind, output, model=self._model, tokenizer=tokenizer)
        completions = [completion_values(completion) for completion in output.completions]
        length = len(output.prompt_token_ids)
        return {**row.name.as_output(), **row.copied, "prompt_tokens": length, "completions": completions}

    def _fail(self, name: Name, error: Exception) -> None:
        message = " ".join(str(error).split())
        self.totals.num_errors += 1
        if name.is_openai:
            self._unwritten.append(openai_batch.error_row(name.key, message))
        else:
            self._unwritten.append({"id": name.id, "error": {"type": type(error).__name__, "message": message}})
        self._write(only_when_due=True)

    def _write(self, *, only_when_due: bool = False) -> None:
        """Writes the answers that are done; a step later is soon enough where few came a moment ago."""
        is_due = time.monotonic() - self._last_write >= _WRITE_SECONDS or len(self._unwritten) >= _WRITE_ROWS
        if not self._unwritten or (only_when_due and not is_due):
            return
        self._job.append(self._unwritten)
        self._unwritten = []
        self._last_write = time.monotonic()
        self.totals.look(self._llm.metrics)
        self._on_progress(self.totals)


def _longest_first(waiting: deque[Row]) -> Iterator[Row]:
    """Empties what was read ahead."""
    rows = sorted(waiting, key=lambda row: row.size, reverse=True)
    waiting.clear()
    yield from rows
