"""Files of JSON rows, a line each, that grow by whole rows only and survive a kill, a power loss or a full disk.

Rows that are appended together are one write: `append_rows` returns when they are on the disk, and takes back what a
failed write left. What a kill or a power loss may leave all the same, a torn end, is cut off by `cut_torn_end` before
the next run goes on. A file that ends in .gz is a gzip file, and each append a member of it.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK = 1 << 20


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows: all of them, or none where the write fails.

    Raises:
        OSError: they cannot be written (the disk is full, for instance); the file is as it was.
    """
    lines = "".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
    # Half of a surrogate pair, which a prompt may bring, has no UTF-8; as an escape it is JSON all the same.
    data = lines.encode(errors="backslashreplace")
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    # A descriptor and not a file object, which would write what failed once more when it is closed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, before)
            raise OSError(error.errno, f"{path} cannot grow: {os.strerror(error.errno or 0)}") from error
    finally:
        os.close(descriptor)
    if not before:
        _sync_folder(path.parent)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of the data; a disk that fills up takes a part first, and fails then."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def cut_torn_end(path: Path) -> int:
    """Drops what a run that was killed left of its last rows.

    Returns:
        How many bytes were dropped.
    """
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_members(file) if path.suffix == ".gz" else _end_of_rows(file)
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
    return size - end


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not blank, with their numbers from 1 up; .gz is unpacked.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: it is no gzip file although it ends in .gz, or is cut short.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} to read rows from.")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is no whole gzip file ({error}); write it anew.") from None


def is_row(line: bytes) -> bool:
    """Whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):  # also what is not UTF-8
        return False


def _end_of_rows(file: BinaryIO) -> int:
    """Where the last whole row ends: a power loss may leave lines of zeros behind it."""
    end = _line_start(file, file.seek(0, os.SEEK_END))
    while end:
        start = _line_start(file, end - 1)
        file.seek(start)
        if is_row(file.read(end - start)):
            break
        end = start
    return end


def _line_start(file: BinaryIO, end: int) -> int:
    """Behind the last newline before `end`; 0 where there is none."""
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _end_of_members(file: BinaryIO) -> int:
    """Where the last whole member of a gzip file ends; each has a checksum."""
    file.seek(0)
    end, pending = 0, b""
    while pending or (pending := file.read(_BLOCK)):
        member, taken = zlib.decompressobj(zlib.MAX_WBITS | 16), 0
        while not member.eof:
            try:
                member.decompress(pending)
            except zlib.error:
                return end
            taken += len(pending) - len(member.unused_data)
            pending = member.unused_data
            if not member.eof and not (pending := file.read(_BLOCK)):
                return end
        end += taken
    return end


def _sync_folder(folder: Path) -> None:
    """Puts a new file's name on the disk, without which its rows are lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
