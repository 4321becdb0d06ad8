"""Reads safetensors files through their header.

The header is JSON behind an 8-byte length, so the arrays are mapped straight from the file. The safetensors package
copies every tensor when it serves numpy, and cannot name the 8-bit floats there.
"""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.loading.mapped import map_tensor

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# The other way round, for writing.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """Where a tensor lies in its file."""

    dtype: str  # safetensors' own name
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


class SafetensorsFile:
    """One safetensors file: `tensors` from its header, arrays mapped on request.

    Raises:
        ValueError: not a safetensors file, or one that is cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        header, start = _read_header(path)
        size = path.stat().st_size
        self.tensors: dict[str, StoredTensor] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensor = _stored_tensor(path, name, entry, start)
            end = tensor.offset + tensor.num_bytes
            if end > size:
                raise ValueError(
                    f"{path} is cut off: tensor {name} ends at byte {end}, the file at {size}; copy it again."
                )
            self.tensors[name] = tensor

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, memory-mapped and read-only; KeyError if the file does not hold it."""
        tensor = self.tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {name} has dtype {tensor.dtype}; readable are {', '.join(_DTYPES)}.")
        dtype = _DTYPES[tensor.dtype]
        expected = dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
        if expected != tensor.num_bytes:
            raise ValueError(
                f"{self.path}: tensor {name} {list(tensor.shape)} {tensor.dtype} needs {expected} bytes; "
                f"the header gives it {tensor.num_bytes}."
            )
        return map_tensor(self.path, dtype, tensor.shape, tensor.offset, tensor.num_bytes)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the offset at which the data starts."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        size = path.stat().st_size
        if not 2 <= length <= size - 8:
            raise ValueError(
                f"{path} is not a safetensors file, or is cut off: its header would take {length} of {size} bytes."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON ({error}).") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object.")
    return header, 8 + length


def _stored_tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        first, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(size) for size in entry["shape"])
        dtype = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: the header entry of tensor {name} is malformed: {entry!r}.") from error
    if not 0 <= first <= end:
        raise ValueError(f"{path}: tensor {name} has data_offsets [{first}, {end}].")
    return StoredTensor(dtype, shape, start + first, end - first)
