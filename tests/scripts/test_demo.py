"""`scripts/demo.py`: the whole demonstration, on a tiny model."""

from pathlib import Path

import pytest

import demo


def test_demo_finds_plain_and_speculative_output_equal(tiny_model, capsys):
    assert demo.main(["--model", str(tiny_model), "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "plain decoding: copy" in out
    assert "speculative decoding, NGRAM: story" in out
    assert "Resolved plan" in out
    assert "equal, token for token" in out


def test_the_embedded_model_is_drafted_for_by_the_head_that_ships():
    spec = demo.automatic_drafts(demo.MODEL)
    assert spec.algorithm == "EAGLE3"
    assert spec.draft_model is not None
    assert (Path(spec.draft_model) / "model.safetensors").is_file()


def test_flags_choose_other_drafts(tiny_model, capsys):
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(tiny_model)]
    assert demo.main(["--model", str(tiny_model), "--max-new-tokens", "6", *flags]) == 0
    assert "speculative decoding, STANDALONE: story" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_answers_have_tokens(value, capsys):
    with pytest.raises(SystemExit):
        demo.main([f"--max-new-tokens={value}"])
    assert "from 1 up" in capsys.readouterr().err


def test_model_that_is_not_there_is_named_as_it_was_given(capsys):
    with pytest.raises(FileNotFoundError, match=r"model '\[/b\]x' is not a file"):
        demo.main(["--model", "[/b]x"])
    assert capsys.readouterr().out.startswith("[/b]x on ")
