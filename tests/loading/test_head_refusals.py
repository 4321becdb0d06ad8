"""A head that would run wrong is refused before it runs, and the message names what to set."""

import math
from typing import Any

import numpy as np
import pytest

from jaxspec.loading.head import load_head
from tests.loading.files import hf_config, write_folder
from tests.loading.heads import head_config, head_tensors, load_target, opened, vocabulary_map

VOCAB, HIDDEN, DRAFT_VOCAB = 64, 32, 24
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = hf_config()
BOTH = ("embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("target"), TARGET)


def refused(tmp_path, config, tensors, target, *, fused=True) -> str:
    """The error of opening or loading a head."""
    write_folder(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=r"\w") as error:
        load_head(opened(tmp_path, TARGET, fused=fused), *target, dtype="float32")
    assert str(tmp_path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
def test_an_eagle3_head_under_eagle_is_refused(untied, tmp_path, dialect):
    config = head_config(dialect, TARGET)
    message = refused(tmp_path, config, head_tensors(config, HIDDEN, own=BOTH), untied, fused=False)
    assert "is an EAGLE3 head" in message
    assert "set algorithm='EAGLE3'" in message


def test_an_eagle_head_under_eagle3_is_refused(untied, tmp_path):
    config = head_config("eagle", TARGET)
    message = refused(tmp_path, config, head_tensors(config, HIDDEN), untied)
    assert "is an EAGLE head (fc reads 64 values" in message
    assert "set algorithm='EAGLE'" in message


def mapped(ids) -> dict[str, np.ndarray]:
    return vocabulary_map(np.asarray(ids), VOCAB)


USUAL = np.arange(DRAFT_VOCAB) * 2
MAPS = {
    "missing": ({}, "has no d2t"),
    "only t2d": ({"t2d": mapped(USUAL)["t2d"]}, "has no d2t"),
    "absolute, beyond": ({"d2t": USUAL + 20}, "subtract i if these are token ids"),
    "absolute, inside": (
        {"d2t": np.arange(DRAFT_VOCAB), "t2d": mapped(np.arange(DRAFT_VOCAB))["t2d"]},
        "d2t and t2d differ",
    ),
    "negative": ({"d2t": mapped(USUAL)["d2t"] - 1}, "0 -> -1"),
    "twice": ({"d2t": mapped([*USUAL[:-1], USUAL[0]])["d2t"]}, "several tokens to one"),
    "another t2d": ({"d2t": mapped(USUAL)["d2t"], "t2d": mapped(USUAL + 1)["t2d"]}, "differ in 48"),
    "too short": ({"d2t": mapped(USUAL)["d2t"][:-1]}, "int64 [23], expected integers [24]"),
    "floats": ({"d2t": mapped(USUAL)["d2t"].astype(np.float32)}, "float32 [24], expected integers"),
    "short t2d": ({"d2t": mapped(USUAL)["d2t"], "t2d": np.ones(VOCAB - 1, bool)}, "t2d is [63]"),
}


@pytest.mark.parametrize(("maps", "message"), MAPS.values(), ids=MAPS)
def test_a_wrong_vocabulary_map_is_refused(untied, tmp_path, maps, message):
    config = head_config("sglang", TARGET, draft_vocab=DRAFT_VOCAB)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    del tensors["d2t"], tensors["t2d"]
    assert message in refused(tmp_path, config, {**tensors, **maps}, untied)


def test_a_whole_vocabulary_may_carry_its_map_in_order_only(untied, tmp_path):
    config = head_config("sglang", TARGET)
    tensors = {**head_tensors(config, HIDDEN, own=BOTH), **mapped(np.arange(VOCAB))}
    load_head(opened(write_folder(tmp_path, config, tensors), TARGET), *untied, dtype="float32")
    tensors |= mapped(np.arange(VOCAB)[::-1])
    assert "reorders the whole vocabulary" in refused(tmp_path, config, tensors, untied)


CONFIGS = {
    "layer beyond": ({"eagle_config": {IDS: [0, 2]}}, "reads layers [0, 2], and the target has 2; set"),
    "layer before": ({"eagle_config": {IDS: [-1, 0]}}, "layers in 0..1"),
    "usual layers of a larger target": ({"eagle_config": {}}, "reads layers [1, 0, -2]"),
    "ids in the wrong place": ({"eagle_config": {}, IDS: [0, 1]}, "move it into eagle_config"),
    "too few layers": ({"eagle_config": {IDS: [1]}}, "fc reads 2 layers of 32 values, and the config names 1"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
    "another vocabulary": ({"vocab_size": 65}, "vocab_size=65, and the target has 64"),
    "more tokens than the target": ({"draft_vocab_size": 65}, "draft_vocab_size=65 is not in 1..64"),
    "another target": ({"target_hidden_size": 48}, "target_hidden_size=48, and the target's have hidden_size=32"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, "is quantised (awq)"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "a switch without its tensor": ({"norm_before_fc": True}, "1 missing: input_norm.weight"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_does_not_fit_is_refused(untied, tmp_path, changes, message):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    assert message in refused(tmp_path, {**config, **changes}, tensors, untied)


OBJECT, NUMBER, NUMBERS = "an object, or null", "a whole number", "a list of whole numbers"
SWITCH, TEXT = "true or false", "a string"
WRONG_IDS: list[Any] = [3, "01", ["a"], [math.nan, 1], [None, 1], [0.7, 1.9], [True, False], {"0": 1}]
TYPED: list[tuple[str, Any, str]] = [
    *(("eagle_config", value, OBJECT) for value in (3, "x", [1])),
    *((name, value, OBJECT) for name in ("rope_scaling", "rope_parameters") for value in (3, "x", [1])),
    *(("draft_vocab_size", value, NUMBER) for value in ([3], math.inf, "64", 64.5, True, 10**400)),
    *(("target_hidden_size", value, NUMBER) for value in ("32", [32])),
    *(("num_hidden_layers", value, NUMBER) for value in ("1", True)),
    *((name, value, SWITCH) for name in ("norm_before_residual", "norm_output", "fc_norm") for value in ("no", 3)),
    *((name, "false", SWITCH) for name in ("norm_before_fc", "bias", "eagle_fc_bias", "tie_word_embeddings")),
    ("model_type", [1], TEXT),
    ("rope_theta", "x", "a number"),
]


def check_typed(message, name, value, expected):
    assert f"has {name}={value!r}; expected {expected}" in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "value", "expected"), TYPED)
def test_a_value_of_another_type_is_refused(untied, tmp_path, name, value, expected):
    config = head_config("sglang", TARGET)
    message = refused(tmp_path, {**config, name: value}, head_tensors(config, HIDDEN, own=BOTH), untied)
    check_typed(message, name, value, expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((IDS, value, NUMBERS) for value in WRONG_IDS),
        *((name, "false", SWITCH) for name in ("use_aux_hidden_state", "norm_output", "fc_norm")),
    ],
)
def test_a_value_of_another_type_in_eagle_config_is_refused(untied, tmp_path, name, value, expected):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    config["eagle_config"] = {**config["eagle_config"], name: value}
    check_typed(refused(tmp_path, config, tensors, untied), name, value, expected)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((IDS, value, NUMBERS) for value in WRONG_IDS),
        *((name, "no", SWITCH) for name in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")),
        ("draft_vocab_size", "64", NUMBER),
    ],
)
def test_a_value_of_another_type_in_speculators_is_refused(untied, tmp_path, name, value, expected):
    config = head_config("speculators", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    check_typed(refused(tmp_path, {**config, name: value}, tensors, untied), name, value, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {name: None}
        for name in ("norm_output", "fc_norm", "bias", "num_hidden_layers", "target_hidden_size", "rope_scaling")
    ],
)
def test_null_is_as_good_as_absent(tmp_path, changes):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    plain = opened(write_folder(tmp_path / "plain", config, tensors), TARGET)
    assert opened(write_folder(tmp_path / "null", {**config, **changes}, tensors), TARGET).config == plain.config


def test_the_layers_of_speculators_are_counted_from_one(untied, tmp_path):
    config = head_config("speculators", TARGET) | {IDS: [0, 1]}
    message = refused(tmp_path, config, head_tensors(config, HIDDEN, own=BOTH), untied)
    assert "reads layers [0, 1]" in message
    assert "layers in 1..2" in message


def test_other_speculators_are_refused(untied, tmp_path):
    config = head_config("speculators", TARGET, speculators_model_type="mlp")
    assert "speculators_model_type='mlp'" in refused(tmp_path, config, head_tensors(config, HIDDEN), untied)


@pytest.mark.parametrize(
    ("dialect", "own", "changes", "message"),
    [
        ("sglang", ["lm_head"], {}, "lacks embed_tokens.weight and cannot use the target's"),
        ("sglang", ["embed_tokens"], {}, "lacks lm_head.weight and cannot use the target's"),
        ("eagle", BOTH, {}, "hidden_size=16 is not the target's 32"),
    ],
)
def test_a_width_that_does_not_fit_is_refused(untied, tmp_path, dialect, own, changes, message):
    config = head_config(dialect, TARGET, hidden_size=16, **changes)
    tensors = head_tensors(config, HIDDEN, own=own)
    assert message in refused(tmp_path, config, tensors, untied, fused=dialect != "eagle")


def test_a_draft_vocabulary_needs_its_own_lm_head(untied, tmp_path):
    config = head_config("sglang", TARGET, draft_vocab=DRAFT_VOCAB)
    message = refused(tmp_path, config, head_tensors(config, HIDDEN), untied)
    assert "has no lm_head.weight" in message


def test_an_fc_for_another_target_is_refused(untied, tmp_path):
    config = head_config("sglang", TARGET)
    message = refused(tmp_path, config, head_tensors(config, 40, own=BOTH), untied)
    assert "fc reads 80 values, and the target gives 64" in message


def test_a_missing_bias_is_refused_with_the_key_to_set(untied, tmp_path):
    config = head_config("eagle", TARGET)
    tensors = head_tensors(config, HIDDEN)
    config.pop("bias")
    assert 'set "bias": false' in refused(tmp_path, config, tensors, untied, fused=False)


def test_tensors_that_do_not_fit_are_listed_by_name(untied, tmp_path):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    del tensors["norm.weight"]
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"][:-1]
    tensors["midlayer.extra.weight"] = np.zeros(3, np.float32)
    message = refused(tmp_path, config, tensors, untied)
    assert "1 missing: norm.weight" in message
    assert "or correct its config.json" in message
    assert "1 not expected: midlayer.extra.weight" in message
    assert "midlayer.mlp.up_proj.weight [39, 32] instead of [40, 32]" in message


def test_one_tensor_under_two_names_is_refused(untied, tmp_path):
    config = head_config("sglang", TARGET)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    tensors["model.fc.weight"] = tensors["fc.weight"]
    assert "which are one tensor" in refused(tmp_path, config, tensors, untied)
