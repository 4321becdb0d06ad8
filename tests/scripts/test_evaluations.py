"""`scripts/eval_acceptance.py` and `scripts/eval_gsm8k.py`: tables, the line of JSON, and what is refused."""

import json

import pytest

import eval_acceptance
import eval_gsm8k

NGRAM = ["--speculative-algorithm", "NGRAM", "--max-new-tokens", "12"]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    records = [{"question": f"How many? {count}", "answer": f"#### {count}"} for count in (3, 4)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_gsm8k_with_and_without_speculation(small, questions, capsys):
    assert eval_gsm8k.main([*small, *NGRAM, "--prompts", str(questions)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 answers have the same tokens" in shown
    report = json.loads(shown.splitlines()[-1])
    assert report["answers_equal"] == 2
    assert report["results"]["NGRAM"]["accuracy"] == report["results"]["plain"]["accuracy"]
    assert report["results"]["plain"]["accept_length"] == 1.0
    assert report["results"]["NGRAM"]["tokens"] == report["results"]["plain"]["tokens"]


def test_speculation_alone(small, questions, capsys):
    args = [*small, *NGRAM, "--prompts", str(questions), "--num-prompts", "1", "--no-compare-plain"]
    assert eval_acceptance.main(args) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["results"]) == ["NGRAM"]
    assert report["results"]["NGRAM"]["prompts"] == 1
    assert report["answers_equal"] is None


def test_records_without_an_answer_are_named(small, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"question": "why?"}\n')
    with pytest.raises(
        ValueError, match=r"other.jsonl:1 has no answer that ends in '#### NUMBER', only \[\"question\"\]"
    ):
        eval_gsm8k.main([*small, "--prompts", str(file)])
    file.write_text("")
    with pytest.raises(ValueError, match=r"other.jsonl has no prompt"):
        eval_acceptance.main([*small, "--prompts", str(file)])
