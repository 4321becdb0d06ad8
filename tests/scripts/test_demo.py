"""`scripts/demo.py`: the whole demonstration, on a tiny model."""

import demo


def test_demo_finds_plain_and_speculative_output_equal(tiny_model, capsys):
    assert demo.main(["--model", str(tiny_model), "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "plain decoding: copy" in out
    assert "speculative decoding, NGRAM: story" in out
    assert "Resolved plan" in out
    assert "equal, token for token" in out
