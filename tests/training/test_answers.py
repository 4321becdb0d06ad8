"""Answers on disk: whole lines only, gone on with after a kill, each independent of the others."""

import json

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.training import answers
from jaxspec.training.answers import AnswerFolder, write_answers
from jaxspec.training.records import PromptRecord
from tests.scripts.tiny_model import write_tiny_model

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, seed=7)
PROMPTS = [PromptRecord(f"p:{index}", f"prompt {index}", {}) for index in range(7)]
SETTINGS = {"model": "tiny", "params": {"max_tokens": 6}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    engine = EngineConfig(max_model_len=128, max_running_requests=4, decode_row_buckets=(4,))
    with LLM(write_tiny_model(tmp_path_factory.mktemp("model")), engine=engine) as llm:
        yield llm


def test_a_killed_run_goes_on_with_the_same_answers(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "SHARD_ROWS", 3)
    whole = AnswerFolder(tmp_path / "whole", SETTINGS)
    write_answers(llm, PROMPTS, whole, PARAMS)
    expected = {answer["id"]: answer for answer in whole.read()}
    assert sorted(expected) == [prompt.key for prompt in PROMPTS]
    assert [shard.name for shard in whole.shards] == [f"answers-0000{index}.jsonl" for index in range(3)]
    assert len({tuple(answer["output_ids"]) for answer in expected.values()}) > 1

    write_answers(llm, PROMPTS[:5], AnswerFolder(tmp_path / "cut", SETTINGS), PARAMS)
    last = tmp_path / "cut" / "answers-00001.jsonl"
    data = last.read_bytes()
    last.write_bytes(data[:-10])  # as a kill, or a full disk, leaves it
    again = AnswerFolder(tmp_path / "cut", SETTINGS)
    assert len(again.done) == 4
    made = []
    write_answers(llm, PROMPTS, again, PARAMS, on_answer=made.append)
    assert len(made) == 3
    assert {answer["id"]: answer for answer in again.read()} == expected
    assert sum(1 for _ in again.read()) == len(PROMPTS)


def test_prompts_are_asked_in_the_chat_template(llm, tmp_path):
    folder = AnswerFolder(tmp_path / "a", SETTINGS)
    write_answers(llm, PROMPTS[:1], folder, PARAMS)
    (answer,) = folder.read()
    text = llm.tokenizer.decode(answer["prompt_ids"], skip_special_tokens=False)
    assert text == "<|im_start|>user\nprompt 0<|im_end|>\n<|im_start|>assistant\n"
    assert answer["finish_reason"] in ("stop", "length")


def test_a_folder_of_other_settings_or_other_files_is_refused(tmp_path):
    AnswerFolder(tmp_path / "a", SETTINGS)
    with pytest.raises(ValueError, match="is of a run with max_tokens=6, and max_tokens=9 is set"):
        AnswerFolder(tmp_path / "a", {"model": "tiny", "params": {"max_tokens": 9}})
    with pytest.raises(ValueError, match="is of a run with model='tiny', and model='other' is set"):
        AnswerFolder(tmp_path / "a", {**SETTINGS, "model": "other"})
    with pytest.raises(FileExistsError, match=r"holds files and no answers\.json"):
        AnswerFolder(tmp_path, SETTINGS)
    (tmp_path / "a" / "answers.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        AnswerFolder(tmp_path / "a", SETTINGS)


def test_lines_are_json(llm, tmp_path):
    folder = AnswerFolder(tmp_path / "a", SETTINGS)
    write_answers(llm, PROMPTS[:2], folder, PARAMS)
    lines = folder.shards[0].read_text().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["finish_reason", "id", "output_ids", "prompt_ids"]] * 2
