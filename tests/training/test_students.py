"""Drafts other than a new EAGLE-3 head: small models (STANDALONE), and heads that are trained further."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.models.layers import rotary_angles
from jaxspec.training.feature_draft import TrainingTimeTest
from jaxspec.training.narrow import components, copy_narrowed
from jaxspec.training.new_decoder import DecoderSettings
from jaxspec.training.new_head import HeadSettings
from jaxspec.training.next_token import NextToken
from jaxspec.training.run import train_draft
from jaxspec.training.trainer import LOG, TrainSettings
from jaxspec.training.unrolled import UnrolledBlock
from tests.conftest import REPO
from tests.loading.heads import write_head
from tests.scripts.tiny_model import HEAD_DIM, LAYERS, write_tiny_model
from tests.tiny import tiny_model

STILL = TrainSettings(epochs=1, rows=4, learning_rate=0.0, log_steps=1)
ENGINE = EngineConfig(max_model_len=64, max_running_requests=4, decode_row_buckets=(4,), chunked_prefill_size=64)
PARAMS = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("data") / "a.jsonl"
    lines = [{"prompt_ids": rng.integers(3, 259, 6).tolist(), "output_ids": [7, 8, 9] * 8} for _ in range(8)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def stored(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(folder) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint.shapes}


def told(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / LOG).read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_all_layers_of_the_target_are_the_target(model, data, tmp_path):
    settings = DecoderSettings(model=str(model), data=(str(data),), layers=tuple(range(LAYERS)), export_dtype="float32")
    draft = train_draft(settings, NextToken(), STILL, tmp_path / "run")
    assert told(tmp_path / "run")[-1]["loss"] == pytest.approx(0.0, abs=1e-5)
    spec = SpecConfig(algorithm="STANDALONE", draft_model=draft, num_steps=3, eagle_topk=1, num_draft_tokens=4)
    with LLM(model, spec=spec, engine=ENGINE) as llm:
        (output,) = llm.generate("one two", PARAMS)
    assert output.accept_length == 4.0


@pytest.mark.parametrize("start", [{"num_layers": 1}, {"layers": (1,)}], ids=["random", "from a layer"])
def test_a_narrow_model_learns(model, data, tmp_path, start):
    settings = DecoderSettings(model=str(model), data=(str(data),), hidden_size=HEAD_DIM, **start)
    fast = dataclasses.replace(STILL, epochs=6, learning_rate=3e-2)
    draft = train_draft(settings, NextToken(), fast, tmp_path / "run")
    losses = [line["loss"] for line in told(tmp_path / "run")]
    assert losses[-1] < 0.7 * losses[0]
    spec = SpecConfig(algorithm="STANDALONE", draft_model=draft, num_steps=2, eagle_topk=1, num_draft_tokens=3)
    with LLM(model, spec=spec, engine=ENGINE) as llm, LLM(model, engine=ENGINE) as plain:
        assert llm.generate("one two", PARAMS)[0].token_ids == plain.generate("one two", PARAMS)[0].token_ids


def test_components_keep_products_of_rows_that_lie_in_few_directions():
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(50, 4)) @ rng.normal(size=(4, 12)), jnp.float32)
    small = table @ components(table, 4)
    assert small.shape == (50, 4)
    np.testing.assert_allclose(small @ small.T, table @ table.T, rtol=1e-4, atol=1e-3)


def test_a_layer_in_as_many_coordinates_is_the_same_layer():
    """In a turned basis of full width; with weights of norms that are not all one."""
    network, leaves = tiny_model(0)
    layer = network.bind(leaves).segments[0]
    width = network.config.hidden_size
    rng = np.random.default_rng(1)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight[...] = jnp.asarray(rng.uniform(0.5, 2.0, width), jnp.float32)
    basis = components(jnp.asarray(rng.normal(size=(100, width)), jnp.float32), width)
    own = copy.deepcopy(layer)
    copy_narrowed(own, layer, basis)
    x = jnp.asarray(rng.normal(size=(1, 5, width)), jnp.float32)
    places = jnp.arange(5)[None]
    angles = rotary_angles(network.config.rope, network.config.head_dim, places)
    block = UnrolledBlock(places, places, step=0)
    expected, _ = layer.extend_layer(x, angles, block, None, 0, None)
    found, _ = own.extend_layer(x @ basis, angles, block, None, 0, None)
    np.testing.assert_allclose(found @ basis.T, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (2,)}, r"layers=\[2\] must be in 0..1"),
        ({"layers": (0,), "num_layers": 2}, "num_layers=2 and 1 layers to start from"),
        ({"hidden_size": 24}, "hidden_size=24 must be a multiple of head_dim=16"),
        ({"hidden_size": 64}, "hidden_size=64 must be from 1 to the target's 32"),
    ],
)
def test_sizes_that_do_not_fit_are_named(model, data, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        train_draft(
            DecoderSettings(model=str(model), data=(str(data),), **changes), NextToken(), STILL, tmp_path / "run"
        )


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [("eagle", {}), ("eagle", {"bias": True}), ("sglang", {"draft_vocab": 40, "own": ("lm_head",), "fc_norm": True})],
)
def test_a_head_is_trained_further(model, data, tmp_path, dialect, changes):
    target = json.loads((model / "config.json").read_text())
    before = write_head(tmp_path / "head", dialect, target, **changes)
    algorithm = "EAGLE" if dialect == "eagle" else "EAGLE3"
    settings = HeadSettings(
        model=str(model), data=(str(data),), init=str(before), fused=algorithm == "EAGLE3", export_dtype="float32"
    )
    still = train_draft(settings, TrainingTimeTest(), STILL, tmp_path / "still")
    expected, found = stored(before), stored(still)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    moving = dataclasses.replace(STILL, epochs=4, learning_rate=1e-2)
    after = train_draft(settings, TrainingTimeTest(), moving, tmp_path / "moved")
    losses = [line["loss"] for line in told(tmp_path / "moved")]
    assert losses[-1] < losses[0]
    spec = SpecConfig(algorithm=algorithm, draft_model=after, num_steps=2, eagle_topk=1, num_draft_tokens=3)
    with LLM(model, spec=spec, engine=ENGINE) as llm:
        assert len(llm.generate("one two", PARAMS)[0].token_ids) == PARAMS.max_tokens


def test_what_a_head_says_itself_is_not_set(model, data, tmp_path):
    settings = HeadSettings(model=str(model), data=(str(data),), init="head", layers=(0,))
    with pytest.raises(ValueError, match=r"layers=\(0,\) has no effect on init='head'"):
        train_draft(settings, TrainingTimeTest(), STILL, tmp_path / "run")
    settings = HeadSettings(model=str(model), data=(str(data),), fused=False)
    with pytest.raises(ValueError, match="a new EAGLE head is not trained; set init"):
        train_draft(settings, TrainingTimeTest(), STILL, tmp_path / "other")


def test_rows_are_spread_over_devices(model, data, tmp_path):
    flags = ["--model", str(model), "--data", str(data), "--epochs", "1", "--log-steps", "1", "--draft-vocab", "100"]
    command = [sys.executable, str(REPO / "scripts" / "train_draft.py"), "train", *flags, "--no-curves"]
    logs = []
    for count in (1, 2):
        out = tmp_path / str(count)
        environment = os.environ | {
            "PYTHONPATH": str(REPO),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}",
        }
        run = subprocess.run(
            [*command, "--rows", "4", "--out", str(out)], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        logs.append(told(out))
    alone, spread = ([line["loss"] for line in log] for log in logs)
    np.testing.assert_allclose(spread, alone, rtol=1e-5)
    odd = subprocess.run(
        [*command, "--rows", "3", "--out", str(tmp_path / "odd")], env=environment, capture_output=True, text=True
    )
    assert odd.returncode == 2
    assert "rows=3 cannot be spread over 2 devices; set rows to a multiple of 2" in odd.stderr
