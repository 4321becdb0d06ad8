"""How a draft does, measured by the engine itself: accept length over prompts, by position and by task."""

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.config import SamplingParams
from jaxspec.llm import LLM
from jaxspec.outputs import Completion, RequestOutput
from jaxspec.reasoning import num_until_end
from jaxspec.training.answers import as_chat
from jaxspec.training.records import PromptRecord, read_prompts

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


@dataclasses.dataclass
class TaskResult:
    """Sums over the prompts of one task.

    Attributes:
        prompts: answers.
        tokens: emitted ones; `reasoning_tokens` of them are up to the end of the model's reasoning.
        rounds: verify rounds, and `round_tokens` what they emitted: the token that ends a prefill is not among them.
        accepted_per_position: entry j is how many rounds accepted at least j + 1 drafts.
        correct: right answers, and `graded` the answers that could be graded.
    """

    prompts: int = 0
    tokens: int = 0
    reasoning_tokens: int = 0
    rounds: int = 0
    round_tokens: int = 0
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)
    correct: int = 0
    graded: int = 0

    def add(self, completion: Completion, *, reasoning_tokens: int, correct: bool | None) -> None:
        """Counts one answer; `correct` is None where it cannot be graded."""
        self.prompts += 1
        self.tokens += len(completion.token_ids)
        self.reasoning_tokens += reasoning_tokens
        self.rounds += completion.rounds
        self.round_tokens += round((completion.accept_length or 0.0) * completion.rounds)
        positions = self.accepted_per_position
        positions.extend([0] * (len(completion.accepted_per_position) - len(positions)))
        for j, count in enumerate(completion.accepted_per_position):
            positions[j] += count
        if correct is not None:
            self.graded += 1
            self.correct += correct

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by rounds / rounds; None without a round."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def accept_rate_per_position(self) -> list[float]:
        """Entry j is the share of rounds that accepted at least j + 1 drafts."""
        return [count / self.rounds for count in self.accepted_per_position]

    @property
    def accuracy(self) -> float | None:
        """Right answers / graded answers; None without one."""
        return self.correct / self.graded if self.graded else None

    def values(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "rounds": self.rounds,
            "accept_length": self.accept_length,
            "accept_rate_per_position": self.accept_rate_per_position,
            "accuracy": self.accuracy,
        }


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results of one engine on some prompts.

    Attributes:
        overall: of all prompts.
        tasks: by task, in the order in which they came.
        token_ids: of each answer.
        seconds: from the first request to the last token; `decode_seconds` is without prefill.
    """

    overall: TaskResult
    tasks: dict[str, TaskResult]
    token_ids: list[list[int]]
    seconds: float
    decode_seconds: float

    @property
    def decode_rate(self) -> float | None:
        """Tokens that rounds emitted per second spent in rounds."""
        return self.overall.round_tokens / self.decode_seconds if self.decode_seconds else None

    def values(self) -> dict[str, Any]:
        """JSON values, without the tokens."""
        return {
            **self.overall.values(),
            "seconds": self.seconds,
            "tokens_per_s_with_prefill": self.overall.tokens / self.seconds,
            "decode_tokens_per_s": self.decode_rate,
            "tasks": {name: task.values() for name, task in self.tasks.items()},
        }


def read_task_prompts(paths: Sequence[str], field: str | None, count: int | None) -> list[PromptRecord]:
    """The first `count` prompts of each file; see `records.read_prompts`."""
    prompts = [prompt for path in paths for prompt in list(read_prompts(Path(path), field))[:count]]
    if not prompts:
        raise ValueError(f"{', '.join(paths)} has no prompt.")
    return prompts


def task_of(prompt: PromptRecord) -> str:
    """The record's category, below the file's name; where it has none the file's name."""
    file, category = prompt.key.split(":")[0], prompt.record.get("category")
    return f"{file}/{category}" if isinstance(category, str) else file


def evaluate(llm: LLM, prompts: Sequence[PromptRecord], params: SamplingParams) -> Evaluation:
    """Has an engine answer prompts (a text is a user's message where the model has a chat template)."""
    has_template = llm.tokenizer is not None and llm.tokenizer.has_chat_template
    asked = [as_chat(prompt.prompt) if has_template else prompt.prompt for prompt in prompts]
    decode_before, start = llm.metrics.decode_seconds, time.perf_counter()
    outputs: list[RequestOutput] = llm.generate(asked, params)
    seconds = time.perf_counter() - start
    overall, tasks = TaskResult(), dict[str, TaskResult]()
    for prompt, output in zip(prompts, outputs, strict=True):
        reasoning = _reasoning_tokens(llm, output)
        correct = grade(prompt.record, output.text)
        for result in (overall, tasks.setdefault(task_of(prompt), TaskResult())):
            result.add(output.completions[0], reasoning_tokens=reasoning, correct=correct)
    token_ids = [output.token_ids for output in outputs]
    return Evaluation(overall, tasks, token_ids, seconds, llm.metrics.decode_seconds - decode_before)


def grade(record: Any, text: str) -> bool | None:
    """Whether a text answers a question of GSM8K: the last number in each counts. None for other records."""
    answer = record.get("answer")
    if not isinstance(answer, str) or "####" not in answer:
        return None
    wanted = last_number(answer.rsplit("####", 1)[1])
    return None if wanted is None else last_number(text) == wanted


def last_number(text: str) -> float | None:
    """The last number of a text; behind "####" where it has that mark, as GSM8K's answers do."""
    found = _NUMBER.findall(text.rsplit("####", 1)[-1])
    return float(re.sub(r"[$,]", "", found[-1])) if found else None


def _reasoning_tokens(llm: LLM, output: RequestOutput) -> int:
    """Tokens of the reasoning, the mark of its end included; without a parser, 0 for a text without that mark."""
    tokenizer = llm.tokenizer
    if output.reasoning_tokens is not None or tokenizer is None:
        return output.reasoning_tokens or 0
    return num_until_end(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), output.token_ids)
