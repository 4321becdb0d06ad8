"""`scripts/bench_overlap.py`: both schedules run, and the last line is JSON with their ratios."""

import json

import bench_overlap


def test_it_measures_both_schedules(small, capsys):
    flags = ["--speculative-algorithm", "NGRAM"]
    assert bench_overlap.main([*small, *flags, "--repeats", "1", "--max-new-tokens", "48"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["algorithm"] == "NGRAM"
    assert report["v2_time_of_v1_with_host_work"] > 0
    assert report["v2_speed_of_v1_without"] > 0
    assert set(report["repeats"][0]["busy"]) == {"v1", "v2"}
