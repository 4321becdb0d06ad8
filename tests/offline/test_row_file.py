"""Files of rows after a kill, a power loss and a full disk: whole rows, and none twice."""

import errno
import gzip
import json

import pytest

from jaxspec.offline import row_file
from jaxspec.offline.row_file import append_rows, cut_torn_end, read_lines
from tests.offline.full_disk import fill_up

ROWS = [{"id": index, "text": f"the answer {index} \u20ac \ud800"} for index in range(3)]


def rows_of(path) -> list:
    return [json.loads(line) for _, line in read_lines(path)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_cut_anywhere_goes_on_with_whole_rows(tmp_path, name):
    """A kill may leave any number of the last append's bytes."""
    path = tmp_path / name
    append_rows(path, ROWS[:2])
    first = path.stat().st_size
    append_rows(path, ROWS[2:])
    data = path.read_bytes()
    for size in range(first, len(data)):
        path.write_bytes(data[:size])
        assert cut_torn_end(path) == size - first
        append_rows(path, ROWS[2:])
        assert rows_of(path) == ROWS
        assert path.read_bytes() == data
    assert cut_torn_end(path) == 0
    if name.endswith(".gz"):
        assert gzip.decompress(data).count(b"\n") == 3


@pytest.mark.parametrize("torn", [b"\0" * 700, b"\0" * 40 + b'99}\n{"id": 5, "te\n', b'{"id": 5}'])
def test_what_a_power_loss_leaves_is_dropped(tmp_path, torn):
    """The file may have grown by blocks that were never written."""
    path = tmp_path / "out.jsonl"
    append_rows(path, ROWS)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + torn)
    assert cut_torn_end(path) == len(torn)
    assert path.stat().st_size == size


def test_a_line_longer_than_a_block_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(row_file, "_BLOCK", 16)
    for name in ("out.jsonl", "out.jsonl.gz"):
        path = tmp_path / name
        append_rows(path, ROWS[:1])
        size = path.stat().st_size
        append_rows(path, ROWS[1:])
        path.write_bytes(path.read_bytes()[:-1])
        cut_torn_end(path)
        assert rows_of(path) == (ROWS[:1] if name.endswith(".gz") else ROWS[:2])
        assert path.stat().st_size >= size


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch, room):
    path = tmp_path / "out.jsonl"
    append_rows(path, ROWS[:1])
    before = path.read_bytes()
    fill_up(monkeypatch, room)
    with pytest.raises(OSError, match="cannot grow: No space left on device") as error:
        append_rows(path, ROWS[1:])
    assert error.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    monkeypatch.undo()
    append_rows(path, ROWS[1:])
    assert rows_of(path) == ROWS


def test_an_unpacked_file_named_gz_is_refused(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n" * 1000)[:-9])
    with pytest.raises(ValueError, match="no whole gzip file"):
        list(read_lines(path))
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="no whole gzip file"):
        list(read_lines(path))
