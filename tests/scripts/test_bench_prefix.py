"""`scripts/bench_prefix.py`: the shared part is computed once, and that is counted."""

import json

import pytest

import bench_prefix


def write_records(path, count: int):
    records = [{"question": f"What is {n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_shared_part_is_computed_once(small, tmp_path, capsys):
    path = write_records(tmp_path / "records.jsonl", 8)
    flags = ["--prompts", str(path), "--num-shots", "2", "--num-prompts", "6", "--pairs", "1", "--max-new-tokens", "2"]
    assert bench_prefix.main([*small, *flags, "--page-size", "16", "--max-running-requests", "2"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (on,), (off,) = report["with"], report["without"]
    first, second = bench_prefix.read_prompts(path, 2, 2)
    shared = next(at for at, (a, b) in enumerate(zip(first, second)) if a != b) // 16 * 16
    assert shared > 64
    assert on["reused_tokens"] == 5 * shared
    assert on["prefilled_tokens"] + on["reused_tokens"] == off["prefilled_tokens"] == on["prompt_tokens"]
    assert report["answers_equal"] == 6
    assert report["time_ratio"] > 0


def test_too_few_records_are_named(tmp_path):
    path = write_records(tmp_path / "records.jsonl", 3)
    with pytest.raises(ValueError, match="has 3 records; 5 examples and 50 questions"):
        bench_prefix.read_prompts(path, 5, 50)
