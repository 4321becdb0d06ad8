"""`scripts/train_draft.py`: answers by the model's own hand, a draft from them, and flags that do not fit."""

import json

import pytest

import train_draft

QUICK = ["--epochs", "1", "--rows", "2", "--log-steps", "1", "--draft-vocab", "100"]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"id": i, "question": f"what is {i}?"}) + "\n" for i in range(4)))
    return file


def test_from_prompts_to_a_measured_draft(small, tiny_model, prompts, tmp_path, capsys):
    answers, run = tmp_path / "answers", tmp_path / "run"
    command = ["answers", *small, "--prompts", str(prompts), "--out", str(answers), "--max-new-tokens", "12"]
    assert train_draft.main(command) == 0
    assert "4 answers in" in capsys.readouterr().out
    flags = ["--model", str(tiny_model), "--data", str(answers), "--out", str(run), *QUICK]
    measured = ["--eval-prompts", str(prompts), "--eval-num-prompts", "1", "--eval-new-tokens", "6"]
    assert train_draft.main(["train", *flags, *measured]) == 0
    assert f"the draft is in {run / 'draft'}" in capsys.readouterr().out
    assert (run / "log.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["epochs"] for line in lines if "epochs" in line] == [1]
    assert lines[-1]["measured"]["accept_length"] >= 1
    assert (run / "draft" / "README.md").read_text().startswith("# EAGLE-3 head for ")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algorithm", "STANDALONE", "--draft-vocab", "5"], "--draft-vocab has no effect on --algorithm STANDALONE"),
        (["--algorithm", "STANDALONE", "--step-decay", "0.5"], "--step-decay has no effect on --algorithm STANDALONE"),
        (["--hidden-size", "5"], "--hidden-size has no effect on --algorithm EAGLE3"),
        (["--algorithm", "EAGLE", "--num-layers", "5"], "--num-layers has no effect on --algorithm EAGLE"),
    ],
)
def test_flags_of_another_kind_of_draft_are_refused(flags, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        train_draft.main(["train", "--data", "nothing.jsonl", "--out", str(tmp_path / "run"), *flags])
