"""Reasoning models: what they think is told from what they answer.

They write `<think>`, their reasoning, `</think>` and the answer; the first mark may be the end of the prompt, where the
chat template writes it. The marks belong to neither part, nor does white space before the first; nothing else is left
out or trimmed, so that the pieces of a stream add up.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer

START, END = "<think>", "</think>"
# Tokens at a prompt's end that may be a mark and white space behind it, however a tokenizer splits them.
_TAIL = 24


@dataclasses.dataclass(frozen=True)
class ReasoningParser:
    """How a family of models writes.

    Attributes:
        is_open: an output begins with reasoning even where no mark says so.
    """

    is_open: bool


PARSERS = {"qwen3": ReasoningParser(is_open=False), "deepseek-r1": ReasoningParser(is_open=True)}


class ReasoningSplitter:
    """Splits one output as it comes; the result does not depend on how the text is cut into pieces.

    Args:
        parser: of the model.
        prompt_end: the end of the prompt's text, which may open the reasoning, or close it.

    Attributes:
        was_closed: whether the reasoning has ended.
        is_open: whether the output is within its reasoning.
    """

    def __init__(self, parser: ReasoningParser, prompt_end: str) -> None:
        end = prompt_end.rstrip()
        self.is_open = not end.endswith(END) and (parser.is_open or end.endswith(START))
        self.was_closed = False
        self._may_start = not end.endswith((START, END))  # the output itself may begin with the mark
        self._held = ""  # may become a mark

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next text; returns what is sure to be reasoning by now, and what is sure to be the answer."""
        text, self._held = self._held + text, ""
        if self._may_start:
            bare = text.lstrip()
            if START.startswith(bare) and bare != START:
                self._held = text
                return "", ""
            self._may_start = False
            if bare.startswith(START):
                self.is_open, text = True, bare.removeprefix(START)
        if not self.is_open:
            return "", text
        reasoning, mark, answer = text.partition(END)
        if mark:
            self.is_open, self.was_closed = False, True
            return reasoning, answer
        begun = next((size for size in range(len(END) - 1, 0, -1) if reasoning.endswith(END[:size])), 0)
        self._held = reasoning[len(reasoning) - begun :]
        return reasoning[: len(reasoning) - begun], ""

    def finish(self) -> tuple[str, str]:
        """What was held back, when the text has ended."""
        held, self._held = self._held, ""
        return (held, "") if self.is_open else ("", held)

    def num_tokens(self, decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> int:
        """How many of the output's tokens are reasoning; `decode` keeps special tokens."""
        return len(token_ids) if self.is_open else num_until_end(decode, token_ids) if self.was_closed else 0


def num_until_end(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> int:
    """Tokens up to the one that completes the mark of the end; 0 where there is none."""
    ids = list(token_ids)
    ended = lambda count: END in decode(ids[:count])  # noqa: E731
    return bisect.bisect_left(range(len(ids)), True, key=ended) if ended(len(ids)) else 0


def check_marks(tokenizer: "Tokenizer") -> None:
    """Raises ValueError if the text of a tokenizer lacks the marks, which nothing can be told by then."""
    for mark in (START, END):
        if mark not in tokenizer.decode(tokenizer.encode(mark)):
            raise ValueError(
                f"the tokenizer leaves {mark} out of its text, as a special token; reasoning_parser cannot work with "
                "this model, leave it out."
            )


def prompt_end(decode: Callable[[list[int]], str], prompt_ids: Sequence[int]) -> str:
    """The end of a prompt's text; `decode` keeps special tokens."""
    return decode(list(prompt_ids[-_TAIL:]))
