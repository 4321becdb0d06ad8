"""A draft tree of fixed form, as users write it: a list of paths, or a JSON file of one."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxspec.checks import check_int, check_path

NodePath = tuple[int, ...]
# Most drafts of a tree, static or not. Each costs a row of every verification; a tree of more is a mistake.
MAX_NODES = 1024


def check_static_tree(value: Sequence[Sequence[int]] | str | os.PathLike[str]) -> tuple[NodePath, ...]:
    """Returns the paths, sorted by length and then by rank.

    Args:
        value: each node as its ranks from the root on, or a JSON file of that.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: it is no list of lists of integers.
        ValueError: it is empty or too large, a path is empty, negative or named twice, or its beginning is missing.
    """
    if isinstance(value, (str, os.PathLike)):
        return _checked(_read(Path(check_path("static_tree", value))), f"{os.fspath(value)}: static_tree")
    return _checked(value, "static_tree")


def _read(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(f"static_tree={str(path)!r} is no file; give a JSON file of paths, or the paths.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"static_tree={str(path)!r} is not JSON ({error}); write it as [[0], [1], [0, 0]].") from None


def _path(name: str, value: object) -> NodePath:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name}={value!r} must be a list of ranks, not {type(value).__name__}.")
    return tuple(check_int(f"{name}[{place}]", rank, low=0, high=MAX_NODES - 1) for place, rank in enumerate(value))


def _checked(value: object, name: str) -> tuple[NodePath, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a list of paths, [[0], [1], [0, 0]] for example, not {type(value).__name__}.")
    if not 0 < len(value) <= MAX_NODES:
        raise ValueError(f"{name} has {len(value)} nodes; set from 1 to {MAX_NODES}.")
    paths = [_path(f"{name}[{place}]", path) for place, path in enumerate(value)]
    known = set(paths)
    for place, path in enumerate(paths):
        if not path:
            raise ValueError(f"{name}[{place}] is empty, which is the root; leave it out.")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"{name} has {list(path)} and not the node above it; add {list(path[:-1])}.")
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"{name} names {list(twice)} twice; leave one out.")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))
