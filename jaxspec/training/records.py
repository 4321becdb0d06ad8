"""Files of records: JSON objects a line (.jsonl, also gzipped), or Parquet; and the prompts in them."""

import gzip
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Fields that hold a prompt, in the order in which they are looked for; and those that name a record.
_PROMPT_FIELDS = ("messages", "conversations", "turns", "question", "prompt", "text")
_ID_FIELDS = ("id", "question_id", "task_id")
# Roles as ShareGPT names them.
_ROLES = {"human": "user", "gpt": "assistant"}

Messages = list[dict[str, str]]


class PromptRecord(NamedTuple):
    """A prompt of a file."""

    key: str  # unique: the file's name and the record's id, or its place in the file
    prompt: str | Messages
    record: Mapping[str, Any]


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each record with where it is, for messages.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: it is of another kind, or a line is not a JSON object.
        ImportError: it is Parquet, and pyarrow is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} to read records from.")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    if path.suffixes[-2:] != [".jsonl", ".gz"] and path.suffix != ".jsonl":
        raise ValueError(f"{path} is not a .jsonl, .jsonl.gz or .parquet file; convert it, or give it its ending.")
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:  # also what is not UTF-8
                raise ValueError(f"{place} is not JSON ({error}); each line must be one JSON object.") from None
            if not isinstance(record, dict):
                raise ValueError(f"{place} is a {type(record).__name__}; each line must be one JSON object.")
            yield place, record


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{path} needs pyarrow; install jaxspec[parquet], or convert it to .jsonl.") from error
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(1024):
        for record in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", record


def read_prompts(path: Path, field: str | None = None) -> Iterator[PromptRecord]:
    """Yields the prompts of a file: texts, or chats up to their first answer.

    Args:
        path: what `read_records` takes.
        field: which field holds the prompt; None looks for one of the usual names. A list of strings is the user's
            turns of a conversation, of which the first is taken.

    Raises:
        ValueError: a record has no prompt, or two have one id; and what `read_records` raises.
    """
    seen: set[str] = set()
    for index, (place, record) in enumerate(read_records(path)):
        name = next((str(record[field]) for field in _ID_FIELDS if field in record), str(index))
        key = f"{path.name.split('.')[0]}:{name}"
        if key in seen:
            raise ValueError(f"{place} has the id {name!r} of an earlier record; give each its own, or none.")
        seen.add(key)
        yield PromptRecord(key, _prompt(record, field, place), record)


def _prompt(record: Mapping[str, Any], field: str | None, place: str) -> str | Messages:
    found = field or next((name for name in _PROMPT_FIELDS if name in record), None)
    value = record.get(found) if found else None
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return value[0]
    if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value):
        messages = read_messages(value, place)
        before = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        if before:
            return messages[:before]
    raise ValueError(
        f"{place} has no prompt in the field {found or ' or '.join(_PROMPT_FIELDS)}, only {sorted(record)}."
    )


def read_messages(turns: list[dict[str, Any]], place: str) -> Messages:
    """A chat in one wording: {"role", "content"} of OpenAI, or {"from", "value"} of ShareGPT.

    Raises:
        ValueError: a turn is neither.
    """
    messages: Messages = []
    for turn in turns:
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{place} has a turn without role and content (or from and value): {sorted(turn)}.")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    return messages
