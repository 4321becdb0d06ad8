"""Accept length by task and position, and the grading of GSM8K."""

import json

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpecConfig
from jaxspec.training.evaluation import TaskResult, evaluate, grade, last_number, read_task_prompts, task_of
from tests.scripts.tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.", 7.0),
        ("It costs $1,234.50 in all", 1234.5),
        ("Below zero: -12", -12.0),
        ("It is 5 at first.\n#### 18\n", 18.0),
        ("none at all", None),
    ],
)
def test_the_last_number_is_the_answer(text, number):
    assert last_number(text) == number


def test_only_records_of_gsm8k_are_graded():
    record = {"question": "?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    assert grade(record, "so there are 4.") is True
    assert grade(record, "so there are 40") is False
    assert grade(record, "I do not know") is False
    assert grade({"prompt": "def f():"}, "4") is None


def test_counts_agree_with_the_engines_own(tmp_path):
    files = {"one": [{"question": "a b a b"}, {"question": "c d"}], "two": [{"turns": ["e", "f"], "category": "x"}]}
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prompts = read_task_prompts([str(tmp_path / f"{name}.jsonl") for name in files], None, None)
    assert [task_of(prompt) for prompt in prompts] == ["one", "one", "two/x"]
    model = write_tiny_model(tmp_path / "model")
    engine = EngineConfig(max_model_len=128, max_running_requests=2, decode_row_buckets=(2,), chunked_prefill_size=64)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(model, spec=SpecConfig(algorithm="NGRAM"), engine=engine) as llm:
        found = evaluate(llm, prompts, params)
        stats = llm.metrics.stats
    assert (found.overall.rounds, found.overall.round_tokens) == (stats.rounds, stats.round_tokens)
    assert found.overall.accepted_per_position == stats.accepted_per_position
    assert found.overall.accept_length == stats.accept_length
    assert found.overall.tokens == 72 == sum(map(len, found.token_ids))
    assert sum(task.rounds for task in found.tasks.values()) == stats.rounds
    assert list(found.tasks) == ["one", "two/x"]
    assert found.overall.accuracy is None
    assert json.dumps(found.values())


def test_nothing_counted_has_no_rates():
    assert TaskResult().accept_length is None
    assert TaskResult().accept_rate_per_position == []
