"""A batch file and the file of its answers: which rows there are, and which are left to be answered."""

import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxspec.offline import openai_batch
from jaxspec.offline.row_file import append_rows, cut_torn_end, read_lines
from jaxspec.offline.rows import Name, name_of
from jaxspec.training.kept_settings import keep_settings
from jaxspec.training.records import read_records


class Job:
    """The rows of one file, answered to another; an answer's row has the id of what it answers.

    Beside the answers is a folder that says how they are made, so that a run goes on with them or not at all. One run
    at a time writes: the job holds a lock until it is closed.

    Args:
        source: rows, as .jsonl or .jsonl.gz.
        out: their answers, likewise.
        settings: how answers are made; JSON values.
        resume: go on with what an earlier run has written.

    Attributes:
        num_rows: rows of the source.
        num_done: answers that were there before, errors included.
        num_cut: bytes of torn rows that were dropped from them.

    Raises:
        FileNotFoundError: there is no source, or no folder for the answers.
        FileExistsError: there are answers, and `resume` is False; or what is there was written by something else.
        ValueError: two rows have one id, the answers are of other rows or settings, or a file cannot be read.
    """

    def __init__(self, source: Path, out: Path, settings: Mapping[str, Any], *, resume: bool):
        for path in (source, out):
            if path.suffixes[-2:] != [".jsonl", ".gz"] and path.suffix != ".jsonl":
                raise ValueError(f"{path} must end in .jsonl or .jsonl.gz; rename it, or convert it.")
        if out.exists() and source.exists() and out.samefile(source):
            raise ValueError(f"{source} is both the prompts and the answers; give another file for the answers.")
        names = _names(source)
        self.source, self.out = source, out
        self.num_rows, self.num_cut = len(names), 0
        self._done: set[str] = set()
        self._lock = _lock(out)
        try:
            self._take_over(names, settings, resume=resume)
        except BaseException:
            self.close()
            raise

    @property
    def num_done(self) -> int:
        return len(self._done)

    def todo(self) -> Iterator[tuple[int, bytes]]:
        """Yields the lines of the source that have no answer, with their numbers."""
        for number, line in read_lines(self.source):
            if name_of(line, number).key not in self._done:
                yield number, line

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Writes answers: they are on the disk when this returns.

        Raises:
            OSError: the disk is full, for instance; none of them is in the file.
        """
        append_rows(self.out, rows)

    def close(self) -> None:
        """Lets another run write."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_over(self, names: Mapping[str, Name], settings: Mapping[str, Any], *, resume: bool) -> None:
        """Goes on with the answers that are there, or begins."""
        if self.out.stat().st_size and not resume:
            raise FileExistsError(f"{self.out} has answers; set resume to go on with them, or give another file.")
        file = self.out.with_name(f"{self.out.name}.run") / "settings.json"
        file.with_suffix(".new").unlink(missing_ok=True)  # of a run that was killed as it began
        if not self.out.stat().st_size:
            file.unlink(missing_ok=True)
        elif not file.is_file():
            raise FileExistsError(f"{self.out} was not written by a run of this script; give another file.")
        keep_settings(file, dict(settings))
        self.num_cut = cut_torn_end(self.out)
        for place, row in read_records(self.out):
            self._note_done(place, row, names)

    def _note_done(self, place: str, row: Mapping[str, Any], names: Mapping[str, Name]) -> None:
        key = str(row.get(openai_batch.ID, row.get("id")))
        if key not in names:
            raise ValueError(f"{place} answers id {key!r}, which {self.source} does not have; is it another file?")
        if key in self._done:
            raise ValueError(f"{place} answers id {key!r} a second time; remove one of the lines.")
        self._done.add(key)


def _lock(out: Path) -> BinaryIO:
    """The file of answers, held by this run alone."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(out.parent)!r} for the answers; make it.")
    file = out.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another run writes {out} now; wait for it, or give another file.") from None
    return file


def _names(source: Path) -> dict[str, Name]:
    """The names of all rows, by key."""
    names: dict[str, Name] = {}
    for number, line in read_lines(source):
        name = name_of(line, number)
        if name.key in names:
            raise ValueError(
                f"{source}:{number} has the id {name.key!r} of an earlier line; give each its own, or none."
            )
        names[name.key] = name
    if not names:
        raise ValueError(f"{source} has no line; give at least one prompt.")
    return names
