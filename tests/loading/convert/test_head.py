"""Heads go from one dialect to the other and back with the same bits, and read as the same head."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.convert import convert_head
from jaxspec.loading.head import load_head
from tests.loading.files import hf_config, write_folder
from tests.loading.heads import head_config, head_tensors, load_target, opened
from tests.loading.torch_files import write_torch

HIDDEN, DRAFT_VOCAB = 32, 24
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = hf_config()
BOTH = ("embed_tokens", "lm_head")
SWITCHES = {
    "plain": {},
    "draft vocabulary": {"draft_vocab": DRAFT_VOCAB},
    "all": {"draft_vocab": DRAFT_VOCAB, "norm_before_residual": True, "fc_norm": True, "norm_before_fc": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("target"), TARGET)


def write(folder: Path, dialect: str, *, own=BOTH, dtype=ml_dtypes.bfloat16, prefix="", **changes) -> Path:
    """A head's folder, its weights in `dtype`."""
    config = head_config(dialect, TARGET, **changes)
    tensors = head_tensors(config, HIDDEN, own=own, prefix=prefix)
    return write_folder(
        folder, config, {n: v.astype(dtype) if v.dtype == np.float32 else v for n, v in tensors.items()}
    )


def read_all(folder: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.shapes}


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Same names, dtypes, shapes and bytes."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("dialects", [("sglang", "speculators"), ("speculators", "sglang")], ids="->".join)
def test_there_and_back_is_the_same_head(tmp_path, dialects, switches, dtype):
    first, second = dialects
    source = write(tmp_path / "a", first, dtype=dtype, **switches)
    convert_head(source, tmp_path / "b", to=second)
    convert_head(tmp_path / "b", tmp_path / "c", to=first)
    check_equal(read_all(tmp_path / "c"), read_all(source))
    configs = [opened(tmp_path / name, TARGET) for name in "abc"]
    assert configs[0].config == configs[1].config == configs[2].config
    before, after = read_config(source), read_config(tmp_path / "c")
    if first == "sglang":
        after["eagle_config"].pop("use_aux_hidden_state")
        assert {**before, "draft_vocab_size": before["draft_vocab_size"] or 64} == after
    else:
        assert before["transformer_layer_config"].items() <= after["transformer_layer_config"].items()
        assert before[IDS] == after[IDS]


@pytest.mark.parametrize("dialects", [("sglang", "speculators"), ("speculators", "sglang")], ids="->".join)
def test_both_dialects_load_to_the_same_leaves(target, tmp_path, dialects):
    source = write(tmp_path / "a", dialects[0], **SWITCHES["all"])
    convert_head(source, tmp_path / "b", to=dialects[1])
    (one, one_leaves), (two, two_leaves) = (
        load_head(opened(tmp_path / name, TARGET), *target, dtype="float32") for name in "ab"
    )
    assert one == two
    for left, right in zip(one_leaves, two_leaves, strict=True):
        np.testing.assert_array_equal(left, right)


def test_layer_ids_differ_by_one_and_offsets_do_not(tmp_path):
    source = write(tmp_path / "a", "sglang", draft_vocab=DRAFT_VOCAB)
    summary = convert_head(source, tmp_path / "b", to="speculators", verifier="org/model")
    config, tensors = read_config(tmp_path / "b"), read_all(tmp_path / "b")
    assert config[IDS] == [1, 2]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    assert "layer ids [0, 1] became [1, 2]" in summary.changes
    assert "midlayer.* became layers.0.*" in summary.changes
    np.testing.assert_array_equal(tensors["d2t"], read_all(source)["d2t"])
    assert tensors["t2d"].dtype == np.bool_
    assert summary.num_tensors == len(tensors)
    assert summary.dtypes == {"bfloat16": len(tensors) - 2, "int64": 1, "bool": 1}


@pytest.mark.parametrize("own", [(), ("embed_tokens",), BOTH], ids=str)
def test_what_is_the_targets_stays_the_targets(tmp_path, own):
    source = write(tmp_path / "a", "sglang", own=own)
    convert_head(source, tmp_path / "b", to="speculators")
    convert_head(tmp_path / "b", tmp_path / "c", to="sglang")
    check_equal(read_all(tmp_path / "c"), read_all(source))
    assert (read_config(tmp_path / "c")["draft_vocab_size"] is None) == ("lm_head" not in own)


def test_prefixes_and_torch_files_are_read(tmp_path):
    plain = write(tmp_path / "plain", "sglang", draft_vocab=DRAFT_VOCAB)
    prefixed = write(tmp_path / "prefixed", "sglang", draft_vocab=DRAFT_VOCAB, prefix="model.")
    (tmp_path / "torch").mkdir()
    write_torch(tmp_path / "torch" / "pytorch_model.bin", read_all(plain))
    (tmp_path / "torch" / "config.json").write_text((plain / "config.json").read_text())
    for name, source in {"x": plain, "y": prefixed, "z": tmp_path / "torch"}.items():
        convert_head(source, tmp_path / name, to="speculators")
    check_equal(read_all(tmp_path / "y"), read_all(tmp_path / "x"))
    check_equal(read_all(tmp_path / "z"), read_all(tmp_path / "x"))


def test_marks_are_made_where_a_head_has_offsets_alone(tmp_path):
    config = head_config("sglang", TARGET, draft_vocab=DRAFT_VOCAB)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    marks = tensors.pop("t2d")
    summary = convert_head(write_folder(tmp_path / "a", config, tensors), tmp_path / "b", to="speculators")
    np.testing.assert_array_equal(read_all(tmp_path / "b")["t2d"], marks)
    assert "t2d made from d2t" in summary.changes


def test_what_only_speculators_says_comes_back(tmp_path):
    only = {"speculators_version": "9.9", "embed_requires_grad": False, "norm_output": False}
    only["speculators_config"] = {"algorithm": "eagle3", "verifier": {"name_or_path": "org/model"}}
    source = write(tmp_path / "a", "speculators", **only)
    convert_head(source, tmp_path / "b", to="sglang")
    assert "speculators_config" not in read_config(tmp_path / "b")
    convert_head(tmp_path / "b", tmp_path / "c", to="speculators")
    back = read_config(tmp_path / "c")
    assert {name: back[name] for name in only if name != "norm_output"} == {
        name: value for name, value in only.items() if name != "norm_output"
    }


def test_an_unsaid_rope_is_said_as_its_dialect_means_it(tmp_path):
    config = head_config("sglang", TARGET)
    for name in ("rope_theta", "max_position_embeddings"):
        config.pop(name)
    source = write_folder(tmp_path / "a", config, head_tensors(config, HIDDEN, own=BOTH))
    convert_head(source, tmp_path / "b", to="speculators")
    layer = read_config(tmp_path / "b")["transformer_layer_config"]
    assert (layer["rope_theta"], layer["max_position_embeddings"]) == (10000.0, 2048)


def test_a_rope_left_to_the_target_needs_the_target(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    said = hf_config(rope_theta=5e5, rope_scaling=scaling)
    model = write_folder(tmp_path / "model", said, {"x": np.zeros(1, np.float32)})
    config = head_config("speculators", said)
    config["transformer_layer_config"].pop("rope_theta")
    source = write_folder(tmp_path / "a", config, head_tensors(config, HIDDEN, own=BOTH))
    with pytest.raises(ValueError, match=r"leaves rope_theta to the target.*--target"):
        convert_head(source, tmp_path / "b", to="sglang")
    convert_head(source, tmp_path / "b", to="sglang", target=model)
    assert opened(tmp_path / "b", said).config == opened(source, said).config
    assert read_config(tmp_path / "b")["rope_scaling"] == scaling


def test_nested_rope_parameters_are_unnested(tmp_path):
    config = head_config("speculators", TARGET)
    layer = config["transformer_layer_config"]
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta") * 2}
    source = write_folder(tmp_path / "a", config, head_tensors(config, HIDDEN, own=BOTH))
    convert_head(source, tmp_path / "b", to="sglang")
    flat = read_config(tmp_path / "b")
    assert (flat["rope_theta"], flat["rope_scaling"]) == (20000.0, None)
    assert "rope_parameters" not in flat


@pytest.mark.parametrize("bias", [True, False])
def test_an_eagle_head_goes_there_and_back(tmp_path, bias):
    source = write(tmp_path / "a", "eagle", own=("embed_tokens",), bias=bias)
    convert_head(source, tmp_path / "b", to="speculators")
    config, tensors = read_config(tmp_path / "b"), read_all(tmp_path / "b")
    assert (config["speculators_model_type"], config["fusion_bias"], config["layernorms"]) == ("eagle", bias, False)
    assert {"fusion_fc.weight", "transformer.self_attn.q_proj.weight"} <= set(tensors)
    assert ("fusion_fc.bias" in tensors) == bias
    convert_head(tmp_path / "b", tmp_path / "c", to="sglang")
    check_equal(read_all(tmp_path / "c"), read_all(source))
    assert read_config(source) == read_config(tmp_path / "c")
    configs = [opened(tmp_path / name, TARGET, fused=False).config for name in "ac"]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("dialect", "changes", "to", "said"),
    [
        ("sglang", {}, "sglang", "is in the sglang dialect already"),
        ("speculators", {}, "speculators", "is in the speculators dialect already"),
        ("sglang", {}, "vllm", "dialect 'vllm' is not known; set one of sglang, speculators"),
        ("sglang", {"norm_output": False}, "speculators", "norm_output=false"),
        ("speculators", {"norm_output": True}, "sglang", "norm_output=true"),
        ("speculators", {"speculators_model_type": "mlp"}, "sglang", "speculators_model_type='mlp' is not converted"),
        ("sglang", {IDS: [1, 2]}, "speculators", "outside eagle_config"),
        ("sglang", {"quantization_config": {"quant_method": "fp8"}}, "speculators", "is quantised"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, dialect, changes, to, said):
    source = write(tmp_path / "a", dialect, **({} if IDS in changes else changes))
    if IDS in changes:
        config = read_config(source)
        config.pop("eagle_config")
        (source / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=said):
        convert_head(source, tmp_path / "b", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_absolute_token_ids_are_not_taken_for_offsets(tmp_path):
    config = head_config("sglang", TARGET, draft_vocab=DRAFT_VOCAB)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    tensors["d2t"] = tensors["d2t"] + np.arange(DRAFT_VOCAB)
    with pytest.raises(ValueError, match="d2t holds offsets"):
        convert_head(write_folder(tmp_path / "a", config, tensors), tmp_path / "b", to="speculators")


def test_strange_and_missing_tensors_are_named(tmp_path):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    tensors["extra.weight"] = tensors.pop("norm.weight")
    with pytest.raises(ValueError, match=r"lacks norm\.weight and has extra\.weight"):
        convert_head(write_folder(tmp_path / "a", config, tensors), tmp_path / "b", to="speculators")
    model = write_folder(tmp_path / "model", TARGET, {"model.norm.weight": np.ones(HIDDEN, np.float32)})
    with pytest.raises(ValueError, match=r"is not an EAGLE or EAGLE3 head: it has no tensor fc\.weight"):
        convert_head(model, tmp_path / "b", to="speculators")
