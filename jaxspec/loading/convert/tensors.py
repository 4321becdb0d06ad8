"""Tensors on their way from one file to another: described first, read one at a time."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.loading.safetensors_file import DTYPE_NAMES


class Tensor(NamedTuple):
    """What a tensor is, and how it is read when its turn comes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def stored_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor of a checkpoint in its stored dtype; it is mapped, and mapped again when it is read."""
    dtype = checkpoint.read(name).dtype
    return Tensor(dtype, tuple(checkpoint.shapes[name]), lambda: checkpoint.read(name))


def writing_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide types first: every tensor then begins at a multiple of its item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes model.safetensors tensor by tensor, and waits until the disk has it.

    Raises:
        ValueError: a dtype that the format lacks, or a tensor that does not read as it was described.
    """
    order = writing_order(tensors)
    # transformers refuses a file that does not say which framework's tensors it has.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype.name}, which safetensors lacks.")
        start, end = end, end + tensor.num_bytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(_bytes_of(name, tensors[name]))
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(name: str, tensor: Tensor) -> Any:
    """The tensor's bytes as a buffer, without a copy."""
    values = np.asarray(tensor.read(), order="C")
    if (values.dtype, values.shape) != (tensor.dtype, tensor.shape):
        raise ValueError(
            f"tensor {name} reads as {values.dtype.name} {list(values.shape)}, "
            f"expected {tensor.dtype.name} {list(tensor.shape)}."
        )
    return values.reshape(-1).view(np.uint8).data


@contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Makes an OSError without a file name, such as a full disk, one that says where it happened."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
