"""`scripts/bench_overlap.py`: both schedules run, and the last line is JSON with their ratios."""

import json
import re

import pytest

import bench_overlap


def test_it_measures_both_schedules(small, capsys):
    flags = ["--speculative-algorithm", "NGRAM"]
    assert bench_overlap.main([*small, *flags, "--repeats", "1", "--max-new-tokens", "48"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["algorithm"] == "NGRAM"
    assert report["v2_time_of_v1_with_host_work"] > 0
    assert report["v2_speed_of_v1_without"] > 0
    assert set(report["repeats"][0]["busy"]) == {"v1", "v2"}


@pytest.mark.parametrize("flag", ["--repeats=0", "--repeats=-1", "--n=2", "--disable-overlap-schedule", "--stop=x"])
def test_values_without_a_meaning_are_refused_by_name(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_overlap._parse([flag])
    assert exit_.value.code == 2
    assert re.search(rf"error: argument {flag.partition('=')[0]}: ", capsys.readouterr().err)


def test_an_open_number_of_tokens_is_refused():
    with pytest.raises(ValueError, match="set --max-new-tokens"):
        bench_overlap.main(["--max-new-tokens", "none"])


def test_too_few_dispatches_say_what_to_set():
    assert bench_overlap.median_time([9.0, 9.0, 1.0, 2.0, 3.0, 9.0, 9.0], 8) == 2.0
    with pytest.raises(ValueError, match="took 7 dispatches, and the benchmark needs 8; set --max-new-tokens higher"):
        bench_overlap.median_time([1.0] * 6, 8)
