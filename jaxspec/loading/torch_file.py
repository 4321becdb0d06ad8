"""Reads tensors from pytorch_model.bin, and nothing else: a pickle may name any function, so almost none is let in.

The file is a zip: data.pkl describes the tensors, and data/<key> holds the bytes of each storage, uncompressed, so that
they are mapped like those of a safetensors file.
"""

import collections
import io
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.loading.mapped import map_tensor

_DTYPES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
# What reading a file raises that is not what it should be.
_MALFORMED = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError, MemoryError, RecursionError),
    *(pickle.UnpicklingError, zipfile.BadZipFile, struct.error),
)
_REMEMBERS = ("PUT", "BINPUT", "LONG_BINPUT")  # opcodes that say the number themselves
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry; lengths of the name and of the extra field behind it


class _Kind(NamedTuple):
    """Stands for a storage class."""

    dtype: np.dtype


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype
    size: int  # elements


class TorchTensor(NamedTuple):
    """Where a tensor lies; offset and strides count elements of its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """Stands for torch._utils._rebuild_tensor_v2; without attributes, so that a pickle cannot set any."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> TorchTensor:
        return TorchTensor(storage, offset, shape, strides)


class _TensorUnpickler(pickle.Unpickler):
    """Builds containers and descriptions of tensors."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module_name == "torch" and global_name in _DTYPES:
            return _Kind(_DTYPES[global_name])
        raise ValueError(
            f"its pickle asks for {module_name}.{global_name}, and only tensors are read; save the state_dict alone, "
            "or convert it to safetensors"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", _Kind(dtype), str(key), _, int(size)):
                return _Storage(key, dtype, size)
        raise ValueError(f"its pickle refers to {pid!r}, which is not a storage")


class TorchFile:
    """One pytorch_model.bin: `tensors` from its pickle, arrays mapped on request.

    Raises:
        ValueError: not such a file, one that is cut off, or one that holds something other than a dict of tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._entries, text = _read_zip(path)
            _check_memo(text)
            content = _TensorUnpickler(io.BytesIO(text)).load()
            self.tensors = {name: self._checked(name, tensor) for name, tensor in _items(content)}
        except _MALFORMED as error:
            raise ValueError(f"{path} cannot be read: {error}.") from error

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype, memory-mapped and read-only; KeyError if the file does not hold it."""
        storage, offset, shape, strides = self.tensors[name]
        start, num_bytes = self._entries[storage.key]
        whole = map_tensor(self.path, storage.dtype, (storage.size,), start, num_bytes)
        step = storage.dtype.itemsize
        # `_checked` saw that no index leaves the storage.
        return np.lib.stride_tricks.as_strided(
            whole[offset:], shape, tuple(stride * step for stride in strides), writeable=False
        )

    def _checked(self, name: Any, tensor: Any) -> TorchTensor:
        """The tensor, once its bytes are known to be there."""
        if not isinstance(name, str) or not isinstance(tensor, TorchTensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, expected a dict of names and tensors")
        storage, offset, shape, strides = tensor
        numbers = (offset, *shape, *strides)
        if (
            not isinstance(storage, _Storage)
            or len(shape) != len(strides)
            or any(not isinstance(number, int) or number < 0 for number in numbers)
        ):
            raise ValueError(f"tensor {name} is malformed: {tensor!r}")
        if storage.key not in self._entries:
            raise ValueError(f"tensor {name} lies in storage {storage.key}, which the file lacks")
        reach = 0
        if all(shape):
            reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        num_bytes = self._entries[storage.key][1]
        if storage.size * storage.dtype.itemsize != num_bytes or reach > storage.size:
            raise ValueError(
                f"tensor {name} {list(shape)} needs {reach} of {storage.size} {storage.dtype.name}, "
                f"and its storage has {num_bytes} bytes"
            )
        return TorchTensor(storage, offset, tuple(shape), tuple(strides))


def _check_memo(text: bytes) -> None:
    """Refuses a pickle that numbers what it remembers beyond reason: room is made for all the numbers below."""
    for code, number, place in pickletools.genops(text):
        if code.name in _REMEMBERS and isinstance(number, int) and number > len(text):
            raise ValueError(
                f"its pickle is malformed: byte {place} remembers a value as number {number}, and {len(text)} bytes "
                "cannot hold as many; copy it again"
            )


def _items(content: Any) -> list[tuple[Any, Any]]:
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, expected a dict of names and tensors")
    return list(content.items())


def _read_zip(path: Path) -> tuple[dict[str, tuple[int, int]], bytes]:
    """Returns where each storage lies (key -> first byte and length), and the pickle."""
    if not zipfile.is_zipfile(path):
        raise ValueError(
            "it is not a zip file: it is cut off, or was saved before PyTorch 1.6; save it again, or convert it to "
            "safetensors"
        )
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        pickles = [entry for entry in archive.infolist() if entry.filename.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} data.pkl, expected one; convert it to safetensors")
        root = pickles[0].filename.removesuffix("data.pkl")
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"{packed[0]} is compressed, which torch.save does not do; save it again")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("it was saved on a big-endian machine; convert it to safetensors")
        entries = {}
        for entry in archive.infolist():
            if entry.filename.startswith(f"{root}data/"):
                file.seek(entry.header_offset)
                lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                start = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
                if start + entry.file_size > path.stat().st_size:
                    raise ValueError(f"{entry.filename} ends beyond the file, which is cut off; copy it again")
                entries[entry.filename.removeprefix(f"{root}data/")] = (start, entry.file_size)
        return entries, archive.read(pickles[0])
