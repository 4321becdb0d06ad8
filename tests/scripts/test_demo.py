"""`scripts/demo.py`: the whole demonstration, on a tiny model."""

import pytest

import demo


def test_demo_finds_plain_and_speculative_output_equal(tiny_model, capsys):
    assert demo.main(["--model", str(tiny_model), "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "plain decoding: copy" in out
    assert "speculative decoding, NGRAM: story" in out
    assert "Resolved plan" in out
    assert "equal, token for token" in out


@pytest.mark.parametrize("value", ["0", "-1", "x"])
def test_answers_have_tokens(value, capsys):
    with pytest.raises(SystemExit):
        demo.main([f"--max-new-tokens={value}"])
    assert "from 1 up" in capsys.readouterr().err


def test_model_that_is_not_there_is_named_as_it_was_given(capsys):
    with pytest.raises(FileNotFoundError, match=r"model '\[/b\]x' is not a file"):
        demo.main(["--model", "[/b]x"])
    assert capsys.readouterr().out.startswith("[/b]x on ")
