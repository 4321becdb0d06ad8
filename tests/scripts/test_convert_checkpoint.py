"""`scripts/convert_checkpoint.py`: its commands, its last line, and its errors."""

import functools
import re

import pytest

import convert_checkpoint
from jaxspec import cli
from tests.loading.convert.test_head import BOTH, TARGET, check_equal, read_all, write
from tests.loading.heads import opened


def run(*flags) -> int:
    """Runs the script as the command line would, and returns its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.run(functools.partial(convert_checkpoint.main, [str(flag) for flag in flags]))
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_head_is_converted_there_and_back(tmp_path, capsys):
    write(tmp_path / "a", "sglang", own=BOTH, draft_vocab=24)
    assert run("head", tmp_path / "a", tmp_path / "b", "--to", "speculators", "--verifier", "org/model") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"wrote {tmp_path / 'b'}: 16 tensors, ")
    assert "(14 bfloat16, 1 int64, 1 bool); layer ids [0, 1] became [1, 2]; midlayer.* became layers.0.*" in line
    assert run("head", tmp_path / "b", tmp_path / "c", "--to", "sglang") == 0
    check_equal(read_all(tmp_path / "c"), read_all(tmp_path / "a"))
    assert opened(tmp_path / "a", TARGET).config == opened(tmp_path / "c", TARGET).config


def test_a_model_goes_to_orbax_and_back(tiny_model, tmp_path, capsys):
    assert run("hf-to-orbax", tiny_model, tmp_path / "orbax") == 0
    assert run("orbax-to-hf", tmp_path / "orbax", tmp_path / "back") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    check_equal(read_all(tmp_path / "back"), read_all(tiny_model))
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()


def test_overwriting_needs_the_flag(tiny_model, tmp_path, capsys):
    assert run("hf-to-orbax", tiny_model, tmp_path / "orbax") == 0
    assert run("hf-to-orbax", tiny_model, tmp_path / "orbax") == 2
    assert run("hf-to-orbax", tiny_model, tmp_path / "orbax", "--overwrite") == 0
    assert "give --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["head", "nowhere", "out", "--to", "sglang"], "'nowhere' is not a file or folder"),
        (["head", "MODEL", "out", "--to", "vllm"], "dialect 'vllm' is not known; set one of sglang, speculators"),
        (["head", "MODEL", "out", "--to", "speculators"], "is not an EAGLE or EAGLE3 head"),
        (["gguf-to-hf", "MODEL", "out"], "is a Hugging Face folder already"),
        (["gguf-to-hf", "nowhere.gguf", "out"], "'nowhere.gguf' is not a file or folder"),
        (["gguf-to-hf", "MODEL", "out", "--dtype", "int4"], "dtype='int4' is not known"),
        (["hf-to-orbax", "nowhere", "out"], "'nowhere' is not a file or folder"),
        (["hf-to-orbax", "MODEL", "MODEL", "--overwrite"], "is, or holds, what is converted"),
        (["orbax-to-hf", "MODEL", "out"], "give a folder that hf-to-orbax wrote"),
    ],
)
def test_an_error_is_one_line_and_status_2(tiny_model, tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    assert run(*(tiny_model if flag == "MODEL" else flag for flag in flags)) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert re.match(r"error: .*" + re.escape(said), err)
    assert not list(tmp_path.iterdir())


def test_help_says_what_jaxspec_does_not_run(capsys):
    assert run("--help") == 0
    assert "Orbax checkpoints are for other" in capsys.readouterr().out
