"""`scripts/make_prompts.py`: prompts that are all different, the same for the same seed, and readable as prompts."""

import json

import pytest

import make_prompts
from jaxspec.training.records import read_prompts


def made(capsys, *flags: str) -> str:
    assert not make_prompts.main([*flags])
    return capsys.readouterr().out


def test_prompts_differ_and_are_repeatable(capsys, tmp_path):
    text = made(capsys, "--count", "300")
    assert text == made(capsys, "--count", "300")
    assert text != made(capsys, "--count", "300", "--seed", "1")
    (tmp_path / "made.jsonl").write_text(text)
    prompts = list(read_prompts(tmp_path / "made.jsonl"))
    assert len(prompts) == len({json.dumps(prompt.prompt) for prompt in prompts}) == 300


def test_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr(make_prompts, "KINDS", ((1, lambda rng: rng.choice("abc")), (1, lambda rng: "d")))
    with pytest.raises(ValueError, match=r"--count 5 is more than the lists give \(4\); set it lower"):
        list(make_prompts.prompts(5, 0))
    assert sorted(make_prompts.prompts(4, 0)) == list("abcd")
