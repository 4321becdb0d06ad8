"""`scripts/generate.py`: which prompts it reads, and what it prints."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import generate

ROWS = ("--max-running-requests", "2")


def _prompts(*flags: str) -> list:
    args: argparse.Namespace = generate._parse(list(flags))
    return generate.read_prompts(args, only_ids="--skip-tokenizer-init" in flags)


def test_prompts_come_from_every_flag_in_order(tmp_path):
    (tmp_path / "one.txt").write_text("a whole\nfile")
    (tmp_path / "many.txt").write_text("first\n\nsecond\n")
    flags = [
        "--lines",
        str(tmp_path / "many.txt"),
        "--prompt",
        "a",
        "--file",
        str(tmp_path / "one.txt"),
        "--prompt",
        "b",
    ]
    assert _prompts(*flags, "--prompt-ids", "1, 2 3") == ["a", "b", "a whole\nfile", "first", "second", [1, 2, 3]]


def test_stdin_is_one_prompt_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
    assert _prompts() == ["two\nlines"]


def test_chat_wraps_each_prompt_after_the_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert _prompts("--chat", "--system", "Be brief.", "--prompt", "hi") == [messages]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--file", "no/such/file"], "no file 'no/such/file'"),
        (["--system", "x", "--prompt", "y"], "add --chat"),
        (["--chat", "--prompt-ids", "1"], "--chat would wrap it"),
        (["--prompt-ids", "1,x"], "must be token ids"),
        (["--skip-tokenizer-init", "--prompt", "x"], "give the prompt with --prompt-ids"),
        (["--file", "-", "--lines", "-"], "stdin (-) can be read once"),
        (["--lines", os.devnull], "has no line with text"),
        (["--file", sys.executable], "is not UTF-8 text"),
        (["--file", "/"], "no file '/'"),
    ],
)
def test_contradictions_are_named(flags, message):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        _prompts(*flags)


def test_terminal_without_a_prompt_is_told_so(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(ValueError, match="there is no prompt"):
        _prompts()


def test_empty_stdin_is_no_prompt(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(ValueError, match="stdin is empty"):
        _prompts()


def test_logprobs_need_json():
    with pytest.raises(ValueError, match="--logprobs are printed with --json alone"):
        generate.main(["--prompt", "x", "--logprobs", "2"])


def test_interrupt_ends_it_without_a_traceback(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, generate.__file__, "--file", str(pipe)]
    # `scripts` itself is where Python looks first, the package may be in the checkout alone.
    env = {**os.environ, "PYTHONPATH": str(Path(generate.__file__).parents[1])}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process, pipe.open("w"):  # opening waits until the script reads
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_stream_and_json_give_the_same_text(small, capsys):
    flags = [*small, *ROWS, "--prompt", "abcabcabc", "--max-new-tokens", "12", "--temperature", "0"]
    assert generate.main(flags) == 0
    streamed = capsys.readouterr()
    assert generate.main([*flags, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (completion,) = json.loads(line)["completions"]
    assert streamed.out == completion["text"] + "\n"
    assert len(completion["token_ids"]) <= 12
    assert f"[{len(completion['token_ids'])} tokens, {completion['finish_reason']}" in streamed.err


def test_speculation_does_not_change_what_is_printed(small, capsys):
    flags = [
        *small,
        *ROWS,
        "--prompt",
        "abcabcabc",
        "--prompt",
        "xyzxyz",
        "--max-new-tokens",
        "16",
        "--seed",
        "3",
        "--n",
        "2",
    ]
    assert generate.main(flags) == 0
    plain = capsys.readouterr().out
    assert generate.main([*flags, "--speculative-algorithm", "ngram"]) == 0
    assert capsys.readouterr().out == plain
    headings = [line for line in plain.splitlines() if line.startswith("=== prompt")]
    assert headings == [f"=== prompt {p} of 2, completion {c} of 2" for p in (1, 2) for c in (1, 2)]


def test_token_ids_need_no_tokenizer(small, tiny_model, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_model / name).read_bytes())
    flags = [*small, *ROWS, "--model", str(bare), "--skip-tokenizer-init", "--max-new-tokens", "4", "--ignore-eos"]
    assert generate.main([*flags, "--prompt-ids", "5,6,7"]) == 0
    ids = capsys.readouterr().out.split()
    assert len(ids) == 4
    assert all(token.isdecimal() for token in ids)
