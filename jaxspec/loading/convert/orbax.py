"""Converts a Hugging Face folder into an Orbax checkpoint with the same tensors and files beside it, and back."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxspec.loading.checkpoint import FolderCheckpoint, open_checkpoint
from jaxspec.loading.convert.output import Summary, check_output, staged_folder
from jaxspec.loading.convert.tensors import Tensor, stored_tensor, write_safetensors

# The Orbax checkpoint inside a converted folder; the other files lie beside it.
WEIGHTS = "orbax"
_WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def hf_to_orbax(source: str | os.PathLike[str], out: Path, *, overwrite: bool = False) -> Summary:
    """Writes a folder's tensors, by their names and in their dtypes, as an Orbax checkpoint in `out`/orbax.

    config.json, the tokenizer and every other file that holds no weights are copied beside it. Orbax takes all tensors
    at once, so that the memory must hold them.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: a file is missing, in the way, damaged or no Hugging Face
            folder, or a tensor is empty, which Orbax does not store.
    """
    checkpoint = open_checkpoint(source)
    if not isinstance(checkpoint, FolderCheckpoint):
        raise ValueError(f"{checkpoint.path} is a GGUF file; run gguf-to-hf first.")
    check_output(out, source=checkpoint.path, overwrite=overwrite)
    tensors = {name: stored_tensor(checkpoint, name) for name in checkpoint.shapes}
    empty = [name for name, tensor in tensors.items() if 0 in tensor.shape]
    if empty:
        raise ValueError(f"{checkpoint.path}: tensor {empty[0]} has no values, and Orbax stores no such arrays.")
    with staged_folder(out, source=checkpoint.path, overwrite=overwrite) as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / WEIGHTS, {name: _whole(tensor) for name, tensor in tensors.items()})
        changes = _copy_files(checkpoint.path, folder)
    return Summary.of(out, tensors, changes)


def orbax_to_hf(source: str | os.PathLike[str], out: Path, *, overwrite: bool = False) -> Summary:
    """Writes the folder that `hf_to_orbax` read: one model.safetensors, whatever its shards were.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: a file is missing, in the way or damaged, or it is not a folder
            that `hf_to_orbax` wrote.
    """
    folder = Path(os.path.abspath(os.path.expanduser(source)))  # Orbax reads nothing at a relative path
    weights = folder / WEIGHTS
    parts = (folder, folder / "config.json", weights, weights / "_METADATA")
    missing = next((path for path in parts if not path.exists()), None)
    if missing is not None:
        raise FileNotFoundError(f"there is no {missing}; give a folder that hf-to-orbax wrote.")
    check_output(out, source=folder, overwrite=overwrite)
    tensors = _stored_tensors(weights)
    with staged_folder(out, source=folder, overwrite=overwrite) as staging:
        write_safetensors(staging / "model.safetensors", tensors)
        changes = _copy_files(folder, staging, but=WEIGHTS)
    return Summary.of(out, tensors, changes)


def _whole(tensor: Tensor) -> np.ndarray:
    """A tensor in one piece; a mapped one stays mapped."""
    return np.asarray(tensor.read(), order="C")


def _stored_tensors(weights: Path) -> dict[str, Tensor]:
    """The tensors of an Orbax checkpoint.

    Orbax says what they are; they are read from the store below it, one after the other: reads of Orbax that are under
    way when another fails end, with an error each, in an event loop that it has closed.
    """
    try:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{weights}/"}).result()
        is_empty = not store.list().result()
    except Exception as error:
        raise _damaged(weights, "its index cannot be read", error) from error
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer, _quiet_absl():
        tree: Any = None if is_empty else getattr(checkpointer.metadata(weights).item_metadata, "tree", None)
    if not isinstance(tree, Mapping):
        raise ValueError(f"{weights} is damaged, or not an Orbax checkpoint: it does not say what it holds.")
    nested = [name for name, entry in tree.items() if not hasattr(entry, "dtype")]
    if nested:
        raise ValueError(f"{weights} is not one of hf-to-orbax's: {nested[0]!r} is not a tensor, but a tree of them.")
    return {
        name: Tensor(np.dtype(entry.dtype), tuple(entry.shape), _reader(weights, store, name))
        for name, entry in tree.items()
    }


@contextmanager
def _quiet_absl() -> Iterator[None]:
    """Orbax logs a warning where it finds nothing; here that becomes an error."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to get item metadata" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _reader(weights: Path, store: ts.KvStore, name: str) -> Callable[[], np.ndarray]:
    """Reads one tensor of an Orbax checkpoint as it is stored; through jax, 64-bit integers would be narrowed."""

    def read() -> np.ndarray:
        try:
            place = (store / f"{name}/").spec().to_json()
            return ts.open({"driver": "auto", "kvstore": place}).result().read().result()
        except Exception as error:
            raise _damaged(weights, f"tensor {name} cannot be read", error) from error

    return read


def _damaged(weights: Path, what: str, error: Exception) -> ValueError:
    return ValueError(f"{weights} is damaged: {what} ({' '.join(str(error).split())}).")


def _copy_files(source: Path, folder: Path, *, but: str | None = None) -> list[str]:
    """Copies the files that hold no weights; returns what is to be said of the rest."""
    copied: list[str] = []
    left: list[str] = []
    for path in sorted(source.iterdir()):
        if path.name == but or path.name.startswith("."):
            continue
        if path.is_dir():
            left.append(f"{path.name}/")
        elif not path.name.endswith(_WEIGHT_ENDINGS):
            # Contents alone: folders of a cache hold links into a store of files.
            shutil.copyfile(path, folder / path.name)
            copied.append(path.name)
    changes = [f"copied {', '.join(copied)}"]
    return changes + ([f"left out the folders {', '.join(left)}"] if left else [])
