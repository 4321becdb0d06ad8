"""Where a conversion is written: a folder that appears only when it is whole."""

import collections
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxspec.loading.convert.tensors import Tensor, naming_the_disk

# What makes a folder one that a conversion may replace.
_MARK = "config.json"


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a conversion did.

    Attributes:
        path: the folder that it wrote.
        num_tensors: how many tensors, and `num_bytes` of them.
        dtypes: name of a dtype -> how many tensors have it.
        changes: what is not as it was, in words.
    """

    path: Path
    num_tensors: int
    num_bytes: int
    dtypes: Mapping[str, int]
    changes: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, tensors: Mapping[str, Tensor], changes: list[str]) -> "Summary":
        dtypes = collections.Counter(tensor.dtype.name for tensor in tensors.values())
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        return cls(path, len(tensors), num_bytes, dict(dtypes.most_common()), tuple(changes))

    def __str__(self) -> str:
        dtypes = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        changes = "; ".join(self.changes) or "nothing changed"
        return f"wrote {self.path}: {self.num_tensors} tensors, {self.num_bytes:,} bytes ({dtypes}); {changes}"


@contextmanager
def staged_folder(out: Path, *, source: Path | None = None, overwrite: bool) -> Iterator[Path]:
    """Yields an empty folder beside `out`, which becomes `out` if nothing is raised, and is removed otherwise.

    Args:
        out: the folder to make.
        source: what is read, if anything is; it is never replaced.
        overwrite: whether `out` may be there already, as a checkpoint.

    Raises:
        FileExistsError: `out` is there, and `overwrite` is not set.
        ValueError: `out` is the source or holds it, or is a folder or file that no conversion wrote.
    """
    out = Path(os.path.abspath(out))
    check_output(out, source=source, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and named for what it is: a process that is killed leaves it, and nobody takes it for a checkpoint.
    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    staging.mkdir()
    try:
        with naming_the_disk(staging):
            yield staging
        _put_in_place(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_output(out: Path, *, source: Path | None, overwrite: bool) -> None:
    """Raises what `staged_folder` raises, before any work is done."""
    read = None if source is None else source.resolve()
    if read is not None and out.resolve() in (read, *read.parents):
        raise ValueError(f"the output {out} is, or holds, what is converted ({source}); name another folder.")
    if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{out} is there already; name another folder, or give --overwrite.")
    if out.is_symlink() or not (out / _MARK).is_file():
        raise ValueError(f"{out} is not a folder with {_MARK}, and only such a one is overwritten; remove it yourself.")


def _put_in_place(staging: Path, out: Path) -> None:
    old = staging.with_suffix(".old")
    if out.is_dir():
        out.rename(old)
    try:
        staging.rename(out)
    except OSError:
        if old.is_dir():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
