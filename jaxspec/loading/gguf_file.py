"""Reads GGUF files: metadata, tensor table, and tensors dequantised to float32.

The parser is our own because the gguf package builds an array object for every token of the vocabulary, which takes
seconds; the dequantisation is the gguf package's.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxspec.loading.mapped import map_tensor

# All that gguf.quants dequantises, but for the types with codebooks, which nobody has checked here.
READABLE_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    )
)
# What numpy has too.
PLAIN_TYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
# Values dequantised at a time: the temporaries stay in the cache (twice as fast as whole tensors) and small.
_CHUNK_VALUES = 1 << 17

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class StoredTensor(NamedTuple):
    """Where a tensor lies in its file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]  # row-major, as numpy; the file lists it reversed
    offset: int  # from the start of the file
    num_bytes: int


class GGUFFile:
    """One GGUF file: `metadata` and `tensors` read at once, arrays on request.

    Raises:
        ValueError: not a GGUF file of version 2 or 3, a damaged, cut-off or split one, or a tensor type that is not
            readable.
    """

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        if size < 24:
            raise ValueError(f"{path} is not a GGUF file: it has {size} bytes.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                self.metadata, self.tensors = _parse(data, path)
            except (struct.error, EOFError) as error:
                raise ValueError(f"{path} is cut off within its header, at {size} bytes; copy it again.") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} holds a string that is not UTF-8 in its header ({error}).") from error
        for name, tensor in self.tensors.items():
            end = tensor.offset + tensor.num_bytes
            if end > size:
                raise ValueError(
                    f"{path} is cut off: tensor {name} ends at byte {end}, the file at {size}; copy it again."
                )
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise ValueError(
                f"{path} is one of {parts} parts; merge them into one file first (llama-gguf-split --merge)."
            )

    def read(self, name: str) -> np.ndarray:
        """The tensor dequantised, float32 [*shape]; float32 tensors are mapped, not copied."""
        tensor = self.tensors[name]
        if tensor.type == GGMLQuantizationType.F32:
            return map_tensor(self.path, "<f4", tensor.shape, tensor.offset, tensor.num_bytes)
        stored = map_tensor(self.path, np.uint8, (tensor.num_bytes,), tensor.offset, tensor.num_bytes)
        block_len, block_bytes = GGML_QUANT_SIZES[tensor.type]
        step = _CHUNK_VALUES // block_len * block_bytes
        values = np.empty(tensor.num_bytes // block_bytes * block_len, np.float32)
        filled = 0
        for start in range(0, tensor.num_bytes, step):
            chunk = dequantize(stored[None, start : start + step], tensor.type)[0]
            values[filled : filled + chunk.size] = chunk
            filled += chunk.size
        return values.reshape(tensor.shape)

    def read_stored(self, name: str) -> np.ndarray:
        """The tensor as it is stored, mapped, where numpy has its type; else as `read` gives it."""
        tensor = self.tensors[name]
        if tensor.type not in PLAIN_TYPES:
            return self.read(name)
        return map_tensor(self.path, PLAIN_TYPES[tensor.type], tensor.shape, tensor.offset, tensor.num_bytes)


class _Cursor:
    """Reads GGUF's scalars, strings and arrays from a buffer, one after another."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        value = struct.unpack_from(code, self.data, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def raw(self, num_bytes: int) -> bytes:
        value = self.data[self.at : self.at + num_bytes]
        if len(value) != num_bytes:
            raise EOFError
        self.at += num_bytes
        return value

    def string(self) -> str:
        return self.raw(self.scalar("<Q")).decode("utf-8")

    def value(self, kind: int, path: Path) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"{path}: metadata of kind {kind} at byte {self.at} is not known to GGUF version 3.")
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner == _ARRAY:
            raise ValueError(f"{path}: metadata at byte {self.at} is an array of arrays, which no model has.")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            return np.frombuffer(self.raw(count * dtype.itemsize), dtype).tolist()
        return [self.value(inner, path) for _ in range(count)]


def _parse(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(data)
    if cursor.raw(4) != _MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ValueError(f"{path} has GGUF version {version}; readable are 2 and 3, little-endian.")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"), path)
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        reversed_shape = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        entries.append((name, tuple(reversed(reversed_shape)), cursor.scalar("<I"), cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment={alignment!r}; expected a whole number above 0.")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: _stored_tensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in entries
    }


def _stored_tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    if kind not in {int(known) for known in READABLE_TYPES}:
        known = {int(member): member.name for member in GGMLQuantizationType}
        raise ValueError(
            f"{path}: tensor {name} has type {known.get(kind, kind)}; "
            f"readable are {', '.join(known.name for known in READABLE_TYPES)}."
        )
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    count = math.prod(shape)
    if (shape[-1] if shape else 1) % block_len:
        raise ValueError(
            f"{path}: tensor {name} {list(shape)} cannot be {GGMLQuantizationType(kind).name}: "
            f"rows must be a multiple of {block_len}."
        )
    return StoredTensor(GGMLQuantizationType(kind), shape, offset, count // block_len * block_bytes)
