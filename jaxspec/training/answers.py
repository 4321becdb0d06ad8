"""What a target answers to prompts, written to files as it comes: the text that its draft heads are trained on.

A folder holds answers.json, which says how they were made, and shards answers-00000.jsonl, ... of one answer a line. A
run that was killed goes on where it stopped: what is written stays, and a line that was cut short is made anew.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from jaxspec.config import SamplingParams
from jaxspec.llm import LLM
from jaxspec.offline.row_file import append_rows, cut_torn_end
from jaxspec.offline.rows import seed_of
from jaxspec.training.kept_settings import keep_settings
from jaxspec.training.records import PromptRecord, read_records

SETTINGS = "answers.json"
SHARD_ROWS = 1000
# Prompts handed to the engine at once: enough to keep its rows full, and few enough to hold.
_WINDOW = 2048


class Answer(TypedDict):
    """One line of a shard."""

    id: str
    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str


class AnswerFolder:
    """A folder of answers, to be continued.

    Args:
        folder: made where it is missing.
        settings: how the answers are made; JSON values.

    Raises:
        ValueError: the folder holds answers that were made otherwise, or is damaged.
        FileExistsError: it holds something else.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        keep_settings(folder / SETTINGS, settings)
        shards = self.shards
        if shards:
            cut_torn_end(shards[-1])
        self.done = {answer["id"] for answer in self.read()}

    @property
    def shards(self) -> list[Path]:
        """The files, in the order in which they were written."""
        return sorted(self.folder.glob("answers-*.jsonl"))

    def read(self) -> Iterator[Any]:
        """Yields every answer."""
        for shard in self.shards:
            for _, record in read_records(shard):
                yield record

    def append(self, answer: Answer) -> None:
        """Writes one answer; it is on the disk, whole, when this returns."""
        shard = self.folder / f"answers-{len(self.done) // SHARD_ROWS:05}.jsonl"
        append_rows(shard, [answer])
        self.done.add(answer["id"])


def write_answers(
    llm: LLM,
    prompts: Sequence[PromptRecord],
    folder: AnswerFolder,
    params: SamplingParams,
    *,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> None:
    """Answers every prompt that has no answer yet; texts are asked as a user's message.

    Each prompt has a seed of its own, made from `params.seed` and its key: an answer does not depend on what was
    answered before, or with it.
    """
    todo = [prompt for prompt in prompts if prompt.key not in folder.done]
    for first in range(0, len(todo), _WINDOW):
        window = todo[first : first + _WINDOW]
        chats = [as_chat(prompt.prompt) for prompt in window]
        each = [dataclasses.replace(params, seed=seed_of(params.seed, prompt.key)) for prompt in window]
        for chunk in llm.stream(chats, each):
            if chunk.output is None:
                continue
            completion = chunk.output.completions[0]
            answer = Answer(
                id=window[chunk.prompt_index].key,
                prompt_ids=chunk.output.prompt_token_ids,
                output_ids=completion.token_ids,
                finish_reason=completion.finish_reason,
            )
            folder.append(answer)
            on_answer(answer)


def as_chat(prompt: str | list[dict[str, str]]) -> Any:
    """A text as a user's message; a chat as it is."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
