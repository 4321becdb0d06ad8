"""pytorch_model.bin: its tensors are read as they were saved, and a pickle that asks for more runs nothing."""

import collections
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from jaxspec.loading.torch_file import TorchFile
from tests.loading.torch_files import STORAGES, Part, write_torch


def random_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {dtype.name: (random.standard_normal((3, 5)) * 9).astype(dtype) for dtype in STORAGES}


def refusal(path) -> str:
    with pytest.raises(ValueError, match="cannot be read") as error:
        TorchFile(path)
    assert str(path) in str(error.value)
    return str(error.value)


def test_tensors_of_every_dtype_come_back(tmp_path):
    tensors = random_tensors()
    file = TorchFile(write_torch(tmp_path / "pytorch_model.bin", tensors))
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == dict.fromkeys(tensors, (3, 5))
    for name, expected in tensors.items():
        read = file.read(name)
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected)
        assert not read.flags.writeable


def test_scalars_empty_tensors_and_views_come_back(tmp_path):
    whole = np.arange(24, dtype=np.float32)
    content = {
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "transposed": Part(whole, "w", 0, (6, 4), (1, 6)),
        "middle": Part(whole, "w", 5, (2, 3), (6, 1)),
    }
    content["middle"].key = "w2"  # the writer stores one entry a part
    file = TorchFile(write_torch(tmp_path / "pytorch_model.bin", content))
    assert file.read("scalar") == 7
    assert file.read("empty").shape == (0, 4)
    np.testing.assert_array_equal(file.read("transposed"), whole.reshape(4, 6).T)
    np.testing.assert_array_equal(file.read("middle"), [[5, 6, 7], [11, 12, 13]])


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


class Adorned:
    """A dict with a function for an attribute."""

    def __reduce__(self):
        return collections.OrderedDict, (), {"torch": os.getcwd}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (collections.Counter("aab"), "collections.Counter"),
        (ml_dtypes.bfloat16, "ml_dtypes"),
        (Adorned(), "getcwd"),
        (print, "print"),
    ],
)
def test_anything_but_a_tensor_is_refused_by_name(tmp_path, value, named):
    message = refusal(write_torch(tmp_path / "pytorch_model.bin", {"a": np.zeros(2, np.float32), "b": value}))
    assert named in message
    assert "only tensors are read" in message


def test_a_command_in_a_pickle_does_not_run(tmp_path):
    marker = tmp_path / "ran"
    path = write_torch(tmp_path / "pytorch_model.bin", {"a": Command(f"touch {marker}")})
    assert ".system" in refusal(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(np.zeros(4, np.float32), "0", 0, (5,), (1,)), "needs 5 of 4"),
        (Part(np.zeros(4, np.float32), "0", 3, (2,), (1,)), "needs 5 of 4"),
        (Part(np.zeros(4, np.float32), "0", -1, (2,), (1,)), "malformed"),
        (Part(np.zeros(4, np.float32), "0", 3, (2,), (-1,)), "malformed"),
        (Part(np.zeros(4, np.float32), "0", 0, (2, 2), (1,)), "malformed"),
    ],
)
def test_a_view_beyond_its_storage_is_refused(tmp_path, part, message):
    assert message in refusal(write_torch(tmp_path / "pytorch_model.bin", {"a": part}))


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ([1, 2], {}, "a list, expected a dict"),
        ({"epoch": 3}, {}, "'epoch' is a int"),
        ({"a": np.zeros(2, np.float32)}, {"compress": True}, "is compressed"),
        ({"a": np.zeros(2, np.float32)}, {"byteorder": b"big"}, "big-endian"),
        ({"a": np.zeros(2, np.float32)}, {"drop": ["0"]}, "which the file lacks"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, settings, message):
    assert message in refusal(write_torch(tmp_path / "pytorch_model.bin", content, **settings))


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x03\x04 cut off"])
def test_a_file_that_is_no_zip_is_refused(tmp_path, content):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    assert "not a zip file" in refusal(path)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"\x80\x02}r\xff\xff\xff\x7f.", "byte 3 remembers a value as number 2147483647, and 9 bytes"),
        (b"\x80\x02}p2147483647\n.", "as number 2147483647"),
        (b"\x80\x02}p-1\n.", "cannot be read"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "cannot be read"),
        (b"\x80\x02}q\x00", "cannot be read"),
        (b"\x80\x02" + b"(" * 50000 + b")" + b"t" * 50000 + b"Q.", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_a_malformed_pickle_is_refused(tmp_path, pickled, message):
    tracemalloc.start()
    said = refusal(write_torch(tmp_path / "pytorch_model.bin", pickled))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message in said
    assert most < 100e6


def test_a_zip_without_a_pickle_is_refused(tmp_path):
    path = write_torch(tmp_path / "pytorch_model.bin", {})
    path.write_bytes(path.read_bytes().replace(b"data.pkl", b"data.txt"))
    assert "0 data.pkl" in refusal(path)
