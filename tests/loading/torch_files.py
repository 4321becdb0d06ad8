"""Writes files as torch.save does, without torch: names of its module that stand for nothing."""

import collections
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

STORAGES = {
    np.dtype(np.float64): "DoubleStorage",
    np.dtype(np.float32): "FloatStorage",
    np.dtype(np.float16): "HalfStorage",
    np.dtype(ml_dtypes.bfloat16): "BFloat16Storage",
    np.dtype(np.int64): "LongStorage",
    np.dtype(np.int32): "IntStorage",
    np.dtype(np.uint8): "ByteStorage",
    np.dtype(np.bool_): "BoolStorage",
}


def _named(module: str, name: str) -> Any:
    """A class that is pickled as `module.name`."""
    return type(name, (), {"__module__": module})


def _rebuild(*_: Any) -> None: ...


_rebuild.__module__, _rebuild.__name__, _rebuild.__qualname__ = "torch._utils", *["_rebuild_tensor_v2"] * 2
KINDS = {name: _named("torch", name) for name in STORAGES.values()}
Build = tuple[Callable[..., Any], tuple[Any, ...]]


class Part:
    """A tensor that is a view of a storage; offset and strides count elements."""

    def __init__(self, storage: np.ndarray, key: str, offset: int, shape: Iterable[int], strides: Iterable[int]):
        self.storage, self.key = storage.ravel(), key
        self.offset, self.shape, self.strides = offset, tuple(shape), tuple(strides)


class _Stored:
    def __init__(self, part: Part):
        self.part = part


class _TorchPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Stored):
            part = obj.part
            return ("storage", KINDS[STORAGES[part.storage.dtype]], part.key, "cpu", part.storage.size)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Part):
            return _rebuild, (_Stored(obj), obj.offset, obj.shape, obj.strides, False, collections.OrderedDict())
        return NotImplemented


def write_torch(
    path: Path, content: Any, *, compress: bool = False, byteorder: bytes = b"little", drop: Iterable[str] = ()
) -> Path:
    """Saves `content`, in which arrays are tensors, or bytes that stand for a pickle.

    Args:
        drop: names storages that are left out.
    """
    parts: list[Part] = []
    if isinstance(content, Mapping):
        made = ((name, _part(value, str(index))) for index, (name, value) in enumerate(content.items()))
        content = collections.OrderedDict(made)
        parts = [part for part in content.values() if isinstance(part, Part)]
    modules = {"torch": types.ModuleType("torch"), "torch._utils": types.ModuleType("torch._utils")}
    for name, kind in KINDS.items():
        setattr(modules["torch"], name, kind)
    setattr(modules["torch._utils"], "_rebuild_tensor_v2", _rebuild)  # noqa: B010
    text = io.BytesIO(content if isinstance(content, bytes) else b"")
    if not isinstance(content, bytes):
        with mock.patch.dict(sys.modules, modules):
            _TorchPickler(text, protocol=2).dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.writestr("model/data.pkl", text.getvalue())
        archive.writestr("model/byteorder", byteorder)
        for part in parts:
            if part.key not in drop:
                archive.writestr(f"model/data/{part.key}", part.storage.tobytes())
    return path


def _part(value: Any, key: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    strides = tuple(stride // value.itemsize for stride in np.zeros(value.shape, value.dtype).strides)
    return Part(np.ascontiguousarray(value), key, 0, value.shape, strides)
