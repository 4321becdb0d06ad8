"""The picture of a run."""

import json

import pytest

from jaxspec.training.curves import save_curves, simulated_accept_length


def test_simulated_accept_length():
    assert simulated_accept_length([0.5, 0.5, 1.0]) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert simulated_accept_length([0.0, 1.0]) == 1.0


def test_a_log_becomes_a_picture(tmp_path):
    lines = [{"step": step, "loss": 3.0 / step, "accept_length": 1.0 + step / 10} for step in (1, 2, 3)]
    lines += [{"step": 3, "measured": {"accept_length": 1.2}}, {"step": 3, "measured": {}}]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_curves(log, tmp_path / "log.png")
    assert (tmp_path / "log.png").read_bytes().startswith(b"\x89PNG")
