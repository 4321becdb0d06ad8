"""A folder goes to Orbax and back with every bit of every dtype, and with its other files."""

import json

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.convert import hf_to_orbax, orbax_to_hf
from tests.loading.convert.test_head import check_equal, read_all
from tests.loading.files import hf_config, random_tensors, write_folder, write_gguf
from tests.loading.torch_files import write_torch

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.int32, np.uint8, np.bool_)


def tensors_of_every_dtype() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = {f"layers.{i}.{np.dtype(d).name}": (random.random((3, 5)) * 9).astype(d) for i, d in enumerate(DTYPES)}
    # Bits that a detour through another dtype would change: a NaN with a payload, -0, a large integer.
    made["odd"] = np.array([0x7FC1, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16)
    made["large"] = np.array([2**62 + 1, -(2**62)], np.int64)
    made["scalar"] = np.array(1.5, np.float32)
    return made


@pytest.mark.parametrize("num_shards", [1, 3])
def test_there_and_back_keeps_every_bit(tmp_path, num_shards):
    source = write_folder(tmp_path / "hf", hf_config(), tensors_of_every_dtype(), num_shards=num_shards)
    (source / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    first = hf_to_orbax(source, tmp_path / "orbax")
    second = orbax_to_hf(tmp_path / "orbax", tmp_path / "back")
    check_equal(read_all(tmp_path / "back"), tensors_of_every_dtype())
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert not list((tmp_path / "orbax").glob("*.safetensors*"))
    assert (first.num_tensors, first.num_bytes, first.dtypes) == (second.num_tensors, second.num_bytes, second.dtypes)
    assert first.changes == ("copied chat_template.jinja, config.json, tokenizer.json",)


def test_the_orbax_checkpoint_is_one_that_orbax_reads_by_name(tmp_path):
    source = write_folder(tmp_path / "hf", hf_config(), random_tensors(hf_config()))
    hf_to_orbax(source, tmp_path / "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        check_equal(checkpointer.restore(tmp_path / "orbax" / "orbax"), random_tensors(hf_config()))


def test_torch_files_are_read_in_their_strides(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf_config()))
    write_torch(tmp_path / "hf" / "pytorch_model.bin", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    hf_to_orbax(tmp_path / "hf", tmp_path / "orbax")
    assert not (tmp_path / "orbax" / "pytorch_model.bin").exists()
    orbax_to_hf(tmp_path / "orbax", tmp_path / "back")
    np.testing.assert_array_equal(read_all(tmp_path / "back")["a"], [[0, 1, 2], [3, 4, 5]])


def test_other_input_is_refused(tmp_path):
    config = hf_config()
    gguf = write_gguf(tmp_path / "x.gguf", config, random_tensors(config))
    with pytest.raises(ValueError, match="is a GGUF file; run gguf-to-hf first"):
        hf_to_orbax(gguf, tmp_path / "out")
    empty = write_folder(tmp_path / "empty", config, {"x": np.zeros((0, 3), np.float32)})
    with pytest.raises(ValueError, match="tensor x has no values"):
        hf_to_orbax(empty, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="give a folder that hf-to-orbax wrote"):
        orbax_to_hf(empty, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        orbax_to_hf(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_nested_tree_is_not_taken_for_tensors(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "other" / "orbax", {"params": {"x": np.ones(2, np.float32)}})
    with pytest.raises(ValueError, match="'params' is not a tensor, but a tree of them"):
        orbax_to_hf(tmp_path / "other", tmp_path / "out")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("_METADATA", "there is no .*_METADATA"),
        ("manifest.ocdbt", "is damaged, or not an Orbax checkpoint"),
        ("largest", "is damaged: tensor .* cannot be read"),
    ],
)
def test_damage_is_an_error_and_leaves_nothing(tmp_path, lost, said):
    source = write_folder(tmp_path / "hf", hf_config(), random_tensors(hf_config()))
    hf_to_orbax(source, tmp_path / "orbax")
    weights = tmp_path / "orbax" / "orbax"
    values = max(weights.glob("ocdbt*/d/*"), key=lambda path: path.stat().st_size)
    (values if lost == "largest" else weights / lost).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        orbax_to_hf(tmp_path / "orbax", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "orbax"]


def test_the_converted_folder_opens(tmp_path):
    source = write_folder(tmp_path / "hf", hf_config(), random_tensors(hf_config()))
    hf_to_orbax(source, tmp_path / "orbax")
    orbax_to_hf(tmp_path / "orbax", tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").shapes == open_checkpoint(source).shapes
    with pytest.raises(FileNotFoundError, match="has no weights"):
        open_checkpoint(tmp_path / "orbax")
