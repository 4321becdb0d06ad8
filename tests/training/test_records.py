"""Files of records: JSON lines, gzip, Parquet; and the prompts in them."""

import gzip
import json
from pathlib import Path

import pytest

from jaxspec.training.records import read_prompts, read_records


def write(path: Path, *records: dict) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_are_read_and_empty_ones_skipped(tmp_path, name):
    path = write(tmp_path / name, {"a": 1}, {"a": "é"})
    assert [record for _, record in read_records(path)] == [{"a": 1}, {"a": "é"}]


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow, which the extra 'parquet' installs")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([{"question": "a"}, {"question": "b"}]), tmp_path / "a.parquet")
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "a.parquet")] == ["a", "b"]


def test_prompts_have_many_names_and_each_its_key(tmp_path):
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "no"}, {"from": "human", "value": "why"}]
    path = write(
        tmp_path / "mixed.jsonl",
        {"question": "q", "answer": "a"},
        {"question_id": 81, "turns": ["first", "second"]},
        {"task_id": "T/0", "prompt": "def f():"},
        {"conversations": chat},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    )
    prompts = list(read_prompts(path))
    assert [prompt.key for prompt in prompts] == ["mixed:0", "mixed:81", "mixed:T/0", "mixed:3", "mixed:4"]
    assert [prompt.prompt for prompt in prompts] == [
        "q",
        "first",
        "def f():",
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ]
    assert next(iter(read_prompts(path, field="answer"))).prompt == "a"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"a\.jsonl:1 is not JSON"),
        ("[1]", r"a\.jsonl:1 is a list; each line must be one JSON object"),
        ('{"x": 1}', r"a\.jsonl:1 has no prompt in the field messages or .*, only \['x'\]"),
        ('{"question": ""}', "has no prompt in the field question"),
        ('{"messages": [{"role": "user"}]}', "has a turn without role and content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "has no prompt"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', "has the id '1' of an earlier record"),
    ],
)
def test_what_is_no_record_is_named_with_its_line(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        list(read_prompts(tmp_path / "a.jsonl"))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"is not a \.jsonl, \.jsonl\.gz or \.parquet file"):
        list(read_records(tmp_path / "a.txt"))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        list(read_records(tmp_path / "b.jsonl"))
