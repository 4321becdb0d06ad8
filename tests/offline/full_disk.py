"""A disk that fills up."""

import errno
import os

import pytest


def fill_up(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Lets `os.write` take so many bytes more, and then fail as on a full disk."""
    write, left = os.write, room

    def write_what_fits(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, data[:left])
        left -= done
        return done

    monkeypatch.setattr("jaxspec.offline.row_file.os.write", write_what_fits)
