"""Draft heads load from both dialects with every switch, and share what they lack with their target."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxspec.loading.drafts import HeadSource
from jaxspec.loading.head import load_head
from jaxspec.models import ModelConfig
from jaxspec.models.config import RopeConfig
from jaxspec.models.network import Network
from tests.loading.files import hf_config, write_folder
from tests.loading.heads import head_config, head_tensors, load_target, opened, write_head
from tests.loading.torch_files import write_torch

VOCAB, HIDDEN, DRAFT_VOCAB = 64, 32, 24
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = hf_config()
TIED = hf_config(tie_word_embeddings=True)
BOTH = ("embed_tokens", "lm_head")


@pytest.fixture(scope="module", params=["untied", "tied"])
def target(request, tmp_path_factory):
    """Network and leaves of a target."""
    return load_target(tmp_path_factory.mktemp("target"), TIED if request.param == "tied" else TARGET)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return load_target(tmp_path_factory.mktemp("target"), TARGET)


def weights(network: Network, leaves) -> dict[str, jax.Array]:
    """Arrays by dotted path."""
    state = nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in state}


def check_weights(found: dict[str, jax.Array], tensors: dict[str, np.ndarray], *, shared=()) -> None:
    """Every tensor is where its name says, and nothing else but what is shared."""
    places = {}
    for name, value in tensors.items():
        path = name.removeprefix("model.").replace("midlayer.", "layer.").replace("layers.0.", "layer.")
        if path in ("embed_tokens.weight", "lm_head.weight"):
            path = path.removesuffix(".weight")
        if path == "d2t":
            path, value = "target_ids", value + np.arange(len(value))
        if path != "t2d":
            transposed = value.ndim == 2 and path != "embed_tokens"
            places[path] = value.T if transposed else value
    assert set(found) == {*places, *shared}
    for path, value in places.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


SWITCHES = {
    "plain": {},
    "draft vocabulary": {"draft_vocab": DRAFT_VOCAB},
    "norm_before_residual": {"norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all": {"draft_vocab": DRAFT_VOCAB, "norm_before_residual": True, "fc_norm": True, "norm_before_fc": True},
}


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
def test_every_switch_of_both_dialects_loads(untied, tmp_path, dialect, prefix, switches):
    config = head_config(dialect, TARGET, **switches)
    tensors = head_tensors(config, HIDDEN, own=BOTH, prefix=prefix)
    file = opened(write_folder(tmp_path, config, tensors), TARGET)
    head = file.config
    assert head.capture == (0, 1)
    assert head.draft_vocab == switches.get("draft_vocab", VOCAB)
    for name in ("norm_before_residual", "fc_norm", "norm_before_fc"):
        assert getattr(head, name) == switches.get(name, False)
    assert not file.notes
    check_weights(weights(*load_head(file, *untied, dtype="float32")), tensors)


@pytest.mark.parametrize("bias", [None, True, False])
def test_an_eagle_head_has_a_bias_unless_it_says_no(untied, tmp_path, bias):
    config = head_config("eagle", TARGET)
    config.pop("bias")
    if bias is not None:
        config["bias"] = bias
    tensors = head_tensors(config, HIDDEN, own=["embed_tokens"])
    file = opened(write_folder(tmp_path, config, tensors), TARGET, fused=False)
    assert file.config.fc_bias == (bias is not False)
    assert file.config.capture == ("normed",)
    check_weights(weights(*load_head(file, *untied, dtype="float32")), tensors, shared=["lm_head"])


@pytest.mark.parametrize(
    ("dialect", "value", "feed_normed", "final_norm"),
    [
        ("sglang", True, False, True),
        ("sglang", False, False, False),
        ("speculators", True, True, True),
        ("speculators", False, False, True),
    ],
)
def test_norm_output_means_two_things(tmp_path, dialect, value, feed_normed, final_norm):
    head = opened(write_head(tmp_path, dialect, TARGET, own=BOTH, norm_output=value), TARGET).config
    assert (head.feed_normed, head.final_norm) == (feed_normed, final_norm)


@pytest.mark.parametrize("own", [(), ("embed_tokens",), ("lm_head",), BOTH], ids=str)
@pytest.mark.parametrize("dialect", ["eagle", "sglang", "speculators"])
def test_what_is_missing_is_the_targets_own_array(target, tmp_path, dialect, own):
    network, leaves = target
    said = TIED if network.config.tie_embeddings else TARGET
    file = opened(write_head(tmp_path, dialect, said, own=own), said, fused=dialect != "eagle")
    head_network, head_leaves = load_head(file, *target, dtype="float32")
    found, of_target = weights(head_network, head_leaves), weights(network, leaves)
    if "embed_tokens" not in own:
        assert found["embed_tokens"] is of_target["embed_tokens"]
    if "lm_head" not in own:
        # A head that uses one table for both has no second leaf.
        table = of_target.get("lm_head", of_target["embed_tokens"])
        assert found.get("lm_head", found["embed_tokens"]) is table
    hidden = np.random.default_rng(0).standard_normal((3, HIDDEN), np.float32)
    lm_head = found["lm_head"] if "lm_head" in own else of_target.get("lm_head", of_target["embed_tokens"].T)
    logits = head_network.bind(head_leaves).logits(hidden)
    np.testing.assert_allclose(logits, hidden @ lm_head, rtol=2e-5, atol=2e-5)


def test_a_tied_head_reads_its_own_table(untied, tmp_path):
    folder = write_head(tmp_path, "sglang", TARGET, own=["embed_tokens"], tie_word_embeddings=True)
    found = weights(*load_head(opened(folder, TARGET), *untied, dtype="float32"))
    assert "lm_head" not in found


def test_a_head_may_be_narrower_than_its_target(untied, tmp_path):
    folder = write_head(tmp_path, "sglang", TARGET, own=BOTH, hidden_size=16, target_hidden_size=HIDDEN)
    found = weights(*load_head(opened(folder, TARGET), *untied, dtype="float32"))
    assert found["fc.weight"].shape == (2 * HIDDEN, 16)


@pytest.mark.parametrize("ids", [[0], [1], [1, 0, 1, 0]])
def test_any_number_of_layers_may_be_read(untied, tmp_path, ids):
    config = head_config("speculators", TARGET) | {IDS: [index + 1 for index in ids]}
    file = opened(write_folder(tmp_path, config, head_tensors(config, HIDDEN, own=BOTH, num_features=len(ids))), TARGET)
    assert file.config.capture == tuple(ids)
    load_head(file, *untied, dtype="float32")


@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
def test_unsaid_layers_are_the_usual_ones(tmp_path, dialect):
    config = head_config(dialect, TARGET)
    config.pop(IDS, None)
    if dialect == "sglang":
        config["eagle_config"] = {}
    folder = write_folder(tmp_path, config, head_tensors(config, HIDDEN, own=BOTH, num_features=3))
    file = opened(folder, hf_config(num_hidden_layers=16))
    assert file.config.capture == (1, 7, 12)
    (note,) = file.notes
    assert note.after == ([1, 7, 12] if dialect == "sglang" else [2, 8, 13])


def test_an_unsaid_rope_is_filled_by_dialect(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 128
    target = hf_config(rope_theta=5e5, rope_scaling=scaling)
    ropes = {}
    for dialect in ("sglang", "speculators"):
        config = head_config(dialect, target)
        layer = config.get("transformer_layer_config", config)
        layer.pop("rope_theta")
        layer.pop("max_position_embeddings")
        file = opened(write_folder(tmp_path / dialect, config, head_tensors(config, HIDDEN, own=BOTH)), target)
        ropes[dialect] = file.config.layer.rope
        assert {"draft_rope_theta", "draft_max_position"} <= {note.field for note in file.notes}
        assert {note.kind for note in file.notes} == {"auto"}
    assert ropes["sglang"] == RopeConfig(theta=10000.0)
    assert ropes["speculators"] == ModelConfig.from_hf(target).rope


def test_weights_may_come_as_pytorch_model_bin(untied, tmp_path):
    config = head_config("sglang", TARGET, draft_vocab=DRAFT_VOCAB)
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_torch(tmp_path / "pytorch_model.bin", tensors)
    check_weights(weights(*load_head(opened(tmp_path, TARGET), *untied, dtype="float32")), tensors)


@pytest.mark.parametrize("draft_vocab", [None, DRAFT_VOCAB])
def test_the_plan_is_told_how_many_tokens_a_head_chooses_from(tmp_path, draft_vocab):
    write_head(tmp_path, "sglang", TARGET, own=BOTH, draft_vocab=draft_vocab)
    info = HeadSource(opened(tmp_path, TARGET)).info
    assert (info.vocab_size, info.num_tokens) == (VOCAB, draft_vocab or VOCAB)


def test_equal_heads_have_equal_networks(untied, tmp_path):
    write_head(tmp_path, "sglang", TARGET, own=BOTH, draft_vocab=DRAFT_VOCAB)
    first, second = (load_head(opened(tmp_path, TARGET), *untied, dtype="float32")[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_heads_of_other_families_load(untied, tmp_path):
    config = head_config("sglang", TARGET, model_type="qwen3")
    tensors = head_tensors(config, HIDDEN, own=BOTH)
    tensors |= {f"midlayer.self_attn.{name}_norm.weight": np.ones(16, np.float32) for name in "qk"}
    file = opened(write_folder(tmp_path, config, tensors), TARGET)
    assert file.config.layer.qk_norm
    load_head(file, *untied, dtype="float32")
