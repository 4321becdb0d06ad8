"""`scripts/batch_generate.py`: every id once, whatever stops the run, and the answers of an undisturbed one."""

import collections
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import batch_generate
from tests.conftest import REPO
from tests.offline.full_disk import fill_up
from tests.scripts.conftest import NO_CACHE
from tests.scripts.tiny_model import write_tiny_model

WORDS = ("one", "two", "three", "four", "a", "the", "of")
# Two rows run together, so that little is compiled, and a pool in which nothing is preempted.
FLAGS = (
    "--max-running-requests",
    "2",
    "--context-length",
    "128",
    "--max-total-tokens",
    "512",
    "--max-new-tokens",
    "12",
)
FLAGS += (
    "--chunked-prefill-size",
    "128",
    "--prefill-chunk-buckets",
    "128",
    "--decode-row-buckets",
    "2",
    "--page-size",
    "16",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def write_prompts(path: Path, count: int) -> Path:
    rng = random.Random(count)
    rows = []
    for index in range(count):
        row: dict[str, Any] = {"id": f"r{index}", "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))}
        if index % 3 == 0:
            row |= {"temperature": 0.0, "max_tokens": rng.randint(1, 20)}
        rows.append(row)
    write_rows(path, rows)
    return path


def write_rows(path: Path, rows: list) -> None:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def read_rows(path: Path) -> list[dict]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def answers(path: Path) -> dict[Any, dict]:
    """The rows by id; each id is there once."""
    rows = read_rows(path)
    found = {row.get("custom_id", row.get("id")): row for row in rows}
    assert len(found) == len(rows)
    return found


def run(model: Path, source: Path, out: Path, *flags: str) -> None:
    argv = ["--model", str(model), "--input", str(source), "--output", str(out), *FLAGS, *NO_CACHE, *flags]
    assert batch_generate.main(argv) == 0


def summary_of(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_format_is_answered_and_wrong_rows_are_errors(model, tmp_path, capsys):
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"id": 1, "prompt": "Once upon", "logprobs": 1},
        {"id": "two", "messages": chat, "n": 2, "temperature": 0.9},
        {"prompt_ids": [40, 41, 42]},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "x", "messages": chat}},
        {"custom_id": "t", "url": "/v1/completions", "body": {"prompt": "Once", "logprobs": 2, "max_tokens": 3}},
        "{not json",
        {"id": "long", "prompt": "x" * 500},
        {"id": "strange", "prompt": "x", "tempreature": 1},
        {"id": "empty", "prompt": []},
        {"custom_id": "bad", "url": "/v1/embeddings", "body": {}},
        {"id": "mixed", "prompt": ["a", 1]},
    ]
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    write_rows(source, rows)
    run(model, source, out)
    found = answers(out)
    assert set(found) == {1, "two", "line-3", "c", "t", "line-6", "long", "strange", "empty", "bad", "mixed"}
    assert len(found[1]["completions"][0]["logprobs"]) == len(found[1]["completions"][0]["token_ids"])
    assert [one["index"] for one in found["two"]["completions"]] == [0, 1]
    assert found["line-3"]["prompt_tokens"] == 3
    body = found["c"]["response"]["body"]
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["model"] == str(model)
    assert body["usage"]["completion_tokens"] <= 12
    choice = found["t"]["response"]["body"]["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) == 3
    assert found["bad"]["response"]["status_code"] == 400
    assert "is not JSON" in found["line-6"]["error"]["message"]
    assert "max_model_len=128" in found["long"]["error"]["message"]
    assert "'tempreature'" in found["strange"]["error"]["message"]
    assert found["empty"]["error"]["type"] == "ValueError"
    summary = summary_of(capsys)
    assert (summary["num_rows"], summary["num_answered"], summary["num_errors"]) == (11, 5, 6)
    assert summary["output_tokens"] > 0
    assert sum(summary["finish_reasons"].values()) == 6


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> tuple[Path, dict[Any, dict]]:
    """A file of 30 prompts, and what an undisturbed run answers."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_prompts(folder / "in.jsonl", 30)
    run(model, source, folder / "out.jsonl")
    return source, answers(folder / "out.jsonl")


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_full_disk_stops_the_run_and_resume_goes_on(model, whole, tmp_path, monkeypatch, name, capsys):
    source, expected = whole
    out = tmp_path / name
    fill_up(monkeypatch, 2500)
    monkeypatch.setattr("jaxspec.offline.generation._WRITE_SECONDS", 0.0)
    with pytest.raises(OSError, match="No space left on device"):
        run(model, source, out)
    monkeypatch.undo()
    before = answers(out)
    assert 0 < len(before) < 30
    with pytest.raises(FileExistsError, match="has answers; set resume to go on"):
        run(model, source, out)
    capsys.readouterr()
    run(model, source, out, "--resume")
    assert answers(out) == expected
    assert summary_of(capsys)["num_earlier"] == len(before)


def test_the_order_does_not_change_an_answer(model, whole, tmp_path):
    source, expected = whole
    run(model, source, tmp_path / "out.jsonl", "--order", "length")
    assert answers(tmp_path / "out.jsonl") == expected


def test_what_cannot_be_gone_on_with_is_refused(model, whole, tmp_path):
    source, _ = whole
    out = tmp_path / "out.jsonl"
    write_rows(tmp_path / "twice.jsonl", [{"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}])
    with pytest.raises(ValueError, match=r"twice\.jsonl:2 has the id '7' of an earlier line"):
        run(model, tmp_path / "twice.jsonl", out)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="has no line"):
        run(model, tmp_path / "empty.jsonl", out)
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        run(model, source, tmp_path / "out.txt")
    (tmp_path / "link.jsonl").symlink_to(source)
    for same in (source, source.parent / ".." / source.parent.name / source.name, tmp_path / "link.jsonl"):
        with pytest.raises(ValueError, match="another file for the answers"):
            run(model, source, same, "--resume")
    with pytest.raises(FileNotFoundError, match=r"no folder .* for the answers; make it"):
        run(model, source, tmp_path / "none" / "out.jsonl")
    (tmp_path / "mine.jsonl").write_text("not answers\nat all")
    with pytest.raises(FileExistsError, match="was not written by a run of this script"):
        run(model, source, tmp_path / "mine.jsonl", "--resume")
    assert (tmp_path / "mine.jsonl").read_text() == "not answers\nat all"
    write_rows(tmp_path / "two.jsonl", [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "y"}])
    run(model, tmp_path / "two.jsonl", out)
    with pytest.raises(ValueError, match=r"is of a run with temperature=1\.0, and temperature=0.5 is set"):
        run(model, tmp_path / "two.jsonl", out, "--resume", "--temperature", "0.5")
    with pytest.raises(ValueError, match=r"answers id 'a', which .* does not have"):
        run(model, source, out, "--resume")
    write_rows(out, [*read_rows(out), read_rows(out)[0]])
    with pytest.raises(ValueError, match="a second time"):
        run(model, tmp_path / "two.jsonl", out, "--resume")


# What conftest sets: the same programs, so that the answers are those of a run in this process.
AS_HERE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def kill_and_resume(model: Path, source: Path, out: Path, seed: int, *, most: int) -> int:
    """Starts the run over and over and kills it at random moments, until it has ended; returns how often it was killed.

    Every second kill comes while the program starts or compiles, the others while it answers.
    """
    rng = random.Random(seed)
    script = REPO / "scripts" / "batch_generate.py"
    argv = [sys.executable, str(script), "--model", str(model), "--input", str(source), "--output", str(out), *FLAGS]
    argv += ["--resume", "--compilation-cache-dir", str(source.parent / "programs")]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore", **AS_HERE}
    killed = 0
    while True:
        before = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if killed < most:
            while killed % 2 == 0 and process.poll() is None and (not out.exists() or out.stat().st_size == before):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.4 if killed % 2 == 0 else 4))
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=300)
        if process.returncode == 0:
            return killed
        assert process.returncode == -signal.SIGKILL, said.decode()
        killed += 1


def test_a_run_killed_at_random_moments_answers_every_row_once(model, tmp_path):
    source = write_prompts(tmp_path / "in.jsonl", 200)
    expected, out = tmp_path / "expected.jsonl", tmp_path / "out.jsonl"
    run(model, source, expected)
    assert kill_and_resume(model, source, out, 1, most=2) == 2
    assert answers(out) == answers(expected)
    assert len(answers(out)) == 200
    assert collections.Counter(len(row["completions"]) for row in read_rows(out)) == {1: 200}
