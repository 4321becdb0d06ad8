"""A whole training run on a tiny target: it learns, goes on after a kill with the same numbers, and exports a head."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.training.answers import AnswerFolder, write_answers
from jaxspec.training.feature_draft import TrainingTimeTest
from jaxspec.training.new_decoder import DecoderSettings
from jaxspec.training.new_head import HeadSettings
from jaxspec.training.next_token import NextToken
from jaxspec.training.records import PromptRecord
from jaxspec.training.run import DRAFT, Told, train_draft
from jaxspec.training.trainer import LOG, TrainSettings
from tests.conftest import REPO
from tests.scripts.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
ENGINE = EngineConfig(max_model_len=64, max_running_requests=8, decode_row_buckets=(8,), chunked_prefill_size=64)
SETTINGS = TrainSettings(epochs=8, rows=16, learning_rate=1e-2, log_steps=1)


def prompts(first: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(first)
    return [rng.integers(3, 259, 8).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A target that changes its mind little: what comes next can be learned from a few thousand tokens."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        for part, scale in (("o_proj", 0.2), ("down_proj", 0.4), ("model.norm", 4.0)):
            tensors[name] *= scale if part in name else 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def data(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    with LLM(model, engine=ENGINE) as llm, (folder / "a.jsonl").open("w") as file:
        for output in llm.generate(prompts(0, 192), GREEDY):
            file.write(json.dumps({"prompt_ids": output.prompt_token_ids, "output_ids": output.token_ids}) + "\n")
    return folder


def settings_of(model: Path, data: Path, **changes) -> HeadSettings:
    return HeadSettings(model=str(model), data=(str(data),), draft_vocab=200, export_dtype="float32", **changes)


def accept_length(model: Path, head: Path) -> float:
    """Of a chain of three, by the engine, on prompts that were not trained on."""
    spec = SpecConfig(algorithm="EAGLE3", draft_model=head, num_steps=3, eagle_topk=1, num_draft_tokens=4)
    with LLM(model, spec=spec, engine=ENGINE) as llm:
        outputs = llm.generate(prompts(1, 32), GREEDY)
        rounds = sum(output.completions[0].rounds for output in outputs)
        assert rounds
        return 1 + llm.metrics.accepted / rounds


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def weights(head: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(head) as checkpoint:
        return {name: np.array(checkpoint.read(name)) for name in checkpoint.shapes}


def test_a_head_learns_and_the_engine_runs_it(model, data, tmp_path, capsys):
    """An untrained head drafts as well: it is the target's last layer, which in this target changes little."""
    told: list[Told] = []
    head = train_draft(settings_of(model, data), TrainingTimeTest(), SETTINGS, tmp_path / "run", tell=told.append)
    losses = [line["loss"] for line in read_log(tmp_path / "run") if "loss" in line]
    assert len(losses) == sum(one.kind == "step" for one in told)
    still = dataclasses.replace(SETTINGS, epochs=1, learning_rate=0.0)
    untrained = train_draft(settings_of(model, data), TrainingTimeTest(), still, tmp_path / "still")
    lengths = accept_length(model, untrained), accept_length(model, head)
    with capsys.disabled():
        print(f"\naccept length {lengths[0]:.2f} untrained, {lengths[1]:.2f} trained; loss {losses[-1]:.2f}")
    drafts = [length - 1 for length in lengths]  # accepted a round
    assert drafts[1] > 1.6 * drafts[0] > 0


def test_a_run_in_pieces_gives_the_same_numbers(model, data, tmp_path):
    few = dataclasses.replace(SETTINGS, epochs=1, save_seconds=0.0)
    whole = train_draft(settings_of(model, data), TrainingTimeTest(), few, tmp_path / "whole")
    for until in (2, 3, None):
        pieces = train_draft(settings_of(model, data), TrainingTimeTest(), few, tmp_path / "pieces", until=until)
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "pieces")
    expected, found = weights(whole), weights(pieces)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)


def test_a_killed_run_goes_on_to_the_same_numbers(model, data, tmp_path):
    flags = ["--model", str(model), "--data", str(data), "--draft-vocab", "200", "--export-dtype", "float32"]
    flags += ["--epochs", "2", "--rows", "16", "--save-seconds", "0", "--log-steps", "1"]
    command = [sys.executable, str(REPO / "scripts" / "train_draft.py"), "train", *flags, "--out"]
    environment = os.environ | {"PYTHONPATH": str(REPO), "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    subprocess.run([*command, str(tmp_path / "whole")], check=True, env=environment, capture_output=True)
    killed = subprocess.Popen([*command, str(tmp_path / "cut")], env=environment, stderr=subprocess.DEVNULL)
    log = tmp_path / "cut" / LOG
    while not (log.is_file() and len(log.read_text().splitlines()) >= 5):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run([*command, str(tmp_path / "cut")], check=True, env=environment, capture_output=True)
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "cut")
    expected, found = weights(tmp_path / "whole" / DRAFT), weights(tmp_path / "cut" / DRAFT)
    assert all((expected[name] == found[name]).all() for name in expected)


def test_other_settings_and_bad_ones_are_refused(model, data, tmp_path):
    one = dataclasses.replace(SETTINGS, epochs=1)
    train_draft(settings_of(model, data), TrainingTimeTest(), one, tmp_path / "run", until=1)
    with pytest.raises(ValueError, match="is of a run with epochs=1, and epochs=2 is set"):
        train_draft(settings_of(model, data), TrainingTimeTest(), dataclasses.replace(one, epochs=2), tmp_path / "run")
    with pytest.raises(ValueError, match=r"layers=\[7\] must be in 0\.\.1"):
        train_draft(settings_of(model, data, layers=(7,)), TrainingTimeTest(), one, tmp_path / "other")
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no answer to learn from"):
        train_draft(settings_of(model, tmp_path / "none.jsonl"), TrainingTimeTest(), one, tmp_path / "third")


def test_runs_share_what_the_target_makes_of_their_texts(model, data, tmp_path):
    one, shared = dataclasses.replace(SETTINGS, epochs=1, log_steps=1), tmp_path / "lessons"
    train_draft(settings_of(model, data), TrainingTimeTest(), one, tmp_path / "head", until=1, lessons=shared)
    kept = {file.name: file.read_bytes() for file in shared.iterdir()}
    draft = DecoderSettings(model=str(model), data=(str(data),), num_layers=1)
    train_draft(draft, NextToken(), one, tmp_path / "own", until=2)
    train_draft(draft, NextToken(), one, tmp_path / "sharing", until=2, lessons=shared)
    assert read_log(tmp_path / "own") == read_log(tmp_path / "sharing") != []
    assert kept == {file.name: file.read_bytes() for file in shared.iterdir()}
    other, unkept = settings_of(model, data, max_length=16), dataclasses.replace(draft, keep_lessons="none")
    with pytest.raises(ValueError, match=r"was made for .* give another folder"):
        train_draft(other, TrainingTimeTest(), one, tmp_path / "other", lessons=shared)
    with pytest.raises(ValueError, match="keep_lessons='none'; leave one of them out"):
        train_draft(unkept, NextToken(), one, tmp_path / "unkept", lessons=shared)


def test_written_answers_are_data(model, tmp_path):
    folder = AnswerFolder(tmp_path / "answers", {})
    with LLM(model, engine=ENGINE) as llm:
        write_answers(llm, [PromptRecord("a", "hi", {})], folder, SamplingParams(temperature=0.0, max_tokens=8))
    one = dataclasses.replace(SETTINGS, epochs=1, rows=1)
    head = train_draft(settings_of(model, tmp_path / "answers"), TrainingTimeTest(), one, tmp_path / "run")
    assert jax.tree.leaves(weights(head))
