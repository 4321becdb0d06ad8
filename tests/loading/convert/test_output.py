"""An output folder is there whole or not at all, and nothing is replaced unasked."""

import re

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxspec.loading.convert.output import staged_folder
from jaxspec.loading.convert.tensors import Tensor, write_safetensors
from jaxspec.loading.safetensors_file import SafetensorsFile


def fill(folder, text="new"):
    (folder / "config.json").write_text(text)


def test_the_folder_appears_when_it_is_whole(tmp_path):
    with staged_folder(tmp_path / "deep" / "out", source=tmp_path / "in", overwrite=False) as folder:
        fill(folder)
        assert not (tmp_path / "deep" / "out").exists()
        assert re.fullmatch(r"\.out\.[0-9a-f]{8}\.partial", folder.name)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "config.json").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interruption_leaves_things_as_they_were(tmp_path, error):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "old")

    def interrupted() -> None:
        with staged_folder(tmp_path / "out", source=tmp_path / "in", overwrite=True) as folder:
            fill(folder)
            raise error

    with pytest.raises(error):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_nothing_is_replaced_unasked(tmp_path):
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", "old")
    (tmp_path / "out" / "more").write_text("x")
    with (
        pytest.raises(FileExistsError, match="is there already; name another folder, or give --overwrite"),
        staged_folder(tmp_path / "out", source=tmp_path / "in", overwrite=False),
    ):
        pass
    with staged_folder(tmp_path / "out", source=tmp_path / "in", overwrite=True) as folder:
        fill(folder)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with staged_folder(tmp_path / "out", source=tmp_path / "in", overwrite=False) as folder:
        fill(folder)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", ["folder", "file", "link"])
def test_only_a_checkpoint_is_overwritten(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photos").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with (
        pytest.raises(ValueError, match=r"only such a one is overwritten"),
        staged_folder(tmp_path / name, source=tmp_path / "in", overwrite=True),
    ):
        pass


@pytest.mark.parametrize("out", ["in", ".", "in/../in"])
def test_the_input_is_never_replaced(tmp_path, out):
    (tmp_path / "in").mkdir()
    fill(tmp_path / "in")
    with (
        pytest.raises(ValueError, match="is, or holds, what is converted"),
        staged_folder(tmp_path / out, source=tmp_path / "in", overwrite=True),
    ):
        pass


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    random = np.random.default_rng(0)
    values = {
        "a": random.standard_normal((3, 5), np.float32),
        "b": np.array([True, False, True]),
        "c": np.array(7, np.int64),
        "empty": np.zeros((0, 2), np.float16),
        "strided": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    tensors = {name: Tensor(v.dtype, v.shape, lambda v=v: v) for name, v in values.items()}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == value.dtype
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    for name, stored in SafetensorsFile(tmp_path / "x.safetensors").tensors.items():
        assert stored.offset % values[name].dtype.itemsize == 0, name


def test_a_tensor_that_is_not_as_described_is_an_error(tmp_path):
    wrong = {"a": Tensor(np.dtype(np.float32), (2,), lambda: np.zeros(3, np.float32))}
    with pytest.raises(ValueError, match=r"tensor a reads as float32 \[3\], expected float32 \[2\]"):
        write_safetensors(tmp_path / "x.safetensors", wrong)
    strange = {"a": Tensor(np.dtype(np.complex64), (2,), lambda: np.zeros(2, np.complex64))}
    with pytest.raises(ValueError, match="dtype complex64, which safetensors lacks"):
        write_safetensors(tmp_path / "x.safetensors", strange)
