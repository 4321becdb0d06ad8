"""Texts to train on: token ids, and which of them the target wrote."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.tokenizer import Tokenizer
from jaxspec.training.records import read_messages, read_records

# Lengths that batches are padded to; each is a shape to compile for.
BUCKET = 64
# Batches of which the examples are sorted by length, so that few of their places are padding.
_SORTED_BATCHES = 32


class Example(NamedTuple):
    """One text."""

    ids: np.ndarray  # int32 [T]
    is_answer: np.ndarray  # bool [T], whether the target wrote the token


class Batch(NamedTuple):
    """Texts of about one length, padded at their ends."""

    indices: np.ndarray  # int [B], which examples; -1 is an empty row
    ids: np.ndarray  # int32 [B, T]
    is_answer: np.ndarray  # bool [B, T]; False in the padding


def read_examples(path: Path, tokenizer: Tokenizer | None, *, max_length: int) -> Iterator[Example]:
    """Yields the texts of a file of records, or of all shards of a folder of answers.

    A record holds an answer (prompt_ids, output_ids), a chat (messages, or ShareGPT's conversations; what the assistant
    says counts as the target's) or a text (all of it counts). What is longer than `max_length` is cut; texts without a
    token that counts are left out.

    Raises:
        FileNotFoundError, ValueError: see `read_records`; a record is none of these, or its ids are no ids.
    """
    files = sorted(file for file in path.iterdir() if ".jsonl" in file.suffixes) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} has no .jsonl file; give a folder of answers, or a file of records.")
    for file in files:
        for place, record in read_records(file):
            ids, is_answer = _tokens(record, place, tokenizer)
            example = Example(np.array(ids[:max_length], np.int32), np.array(is_answer[:max_length], bool))
            if example.is_answer.any():
                yield example


def _tokens(record: Mapping[str, Any], place: str, tokenizer: Tokenizer | None) -> tuple[list[int], list[bool]]:
    if "output_ids" in record:
        prompt, output = record.get("prompt_ids"), record["output_ids"]
        if not isinstance(prompt, list) or not isinstance(output, list):
            raise ValueError(f"{place} has output_ids or prompt_ids that are no list.")
        return prompt + output, [False] * len(prompt) + [True] * len(output)
    chat = record.get("messages", record.get("conversations"))
    if chat is None and not isinstance(record.get("text"), str):
        raise ValueError(f"{place} has no output_ids, messages, conversations or text, only {sorted(record)}.")
    if tokenizer is None:
        raise ValueError(f"{place} is text, and the target has no tokenizer; give answers as ids.")
    if chat is None:
        ids = tokenizer.encode(record["text"])
        return ids, [False] + [True] * (len(ids) - 1)
    return _chat_tokens(read_messages(chat, place), place, tokenizer)


def _chat_tokens(messages: list[dict[str, str]], place: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The whole chat, and which tokens the assistant's turns are, their end included."""
    ids: list[int] = []
    is_answer: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.encode_chat(messages[:index])
        whole = tokenizer.encode_chat(messages[: index + 1], add_generation_prompt=False)
        if whole[: len(before)] != before or before[: len(ids)] != ids:
            raise ValueError(
                f"{place}: the chat template changes what came before turn {index + 1}; give each answer as a chat of "
                "its own."
            )
        is_answer += [False] * (len(before) - len(ids)) + [True] * (len(whole) - len(before))
        ids = whole
    return ids, is_answer


def epoch_batches(lengths: Sequence[int], num_rows: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Which examples go together in an epoch, in the order of training: int [num_rows] each, -1 for an empty row.

    Every example comes once. Those of a batch are of about one length; the same seed and epoch give the same batches.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    batches: list[np.ndarray] = []
    size = num_rows * _SORTED_BATCHES
    for first in range(0, len(order), size):
        near = order[first : first + size]
        near = near[np.argsort(np.asarray(lengths)[near], kind="stable")]
        for start in range(0, len(near), num_rows):
            rows = near[start : start + num_rows]
            batches.append(np.pad(rows, (0, num_rows - len(rows)), constant_values=-1))
    return [batches[i] for i in rng.permutation(len(batches))]


def make_batch(examples: Sequence[Example], indices: np.ndarray) -> Batch:
    """Pads the examples of a batch to the next multiple of `BUCKET`."""
    chosen = [examples[index] if index >= 0 else None for index in indices]
    longest = max(len(example.ids) for example in chosen if example is not None)
    length = -(-longest // BUCKET) * BUCKET
    ids = np.zeros((len(chosen), length), np.int32)
    is_answer = np.zeros((len(chosen), length), bool)
    for row, example in enumerate(chosen):
        if example is not None:
            ids[row, : len(example.ids)] = example.ids
            is_answer[row, : len(example.ids)] = example.is_answer
    return Batch(np.asarray(indices), ids, is_answer)
