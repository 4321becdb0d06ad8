"""One call of `generate` or `stream`: its prompts, their requests, and the chunks that are ready."""

import dataclasses
import random
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from jaxspec.batches import Progress
from jaxspec.config import SamplingParams
from jaxspec.outputs import Completion, FinishReason, RequestOutput, StreamChunk
from jaxspec.reasoning import ReasoningParser, ReasoningSplitter, prompt_end
from jaxspec.request import Request, RequestRules, make_requests
from jaxspec.text import StopHit, TextStream
from jaxspec.tokenizer import Tokenizer

_BYTES = (bytes, bytearray, memoryview)

Message = dict[str, Any]
Prompt = str | list[int] | npt.NDArray[np.integer] | list[Message]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or a list of prompts, as a list of prompts.

    A list whose items are all integers (token ids) or all dicts (chat messages) is one prompt, and so is a 1-D array
    of integers. Arrays become lists.

    Raises:
        TypeError: it is neither, or an array is not of integers.
        ValueError: the list is empty, or an array is not 1-D.
    """
    if isinstance(prompts, str):
        return [prompts]
    if _is_array(prompts):
        return [_array_ids(prompts, "prompts")]
    if isinstance(prompts, _BYTES) or not isinstance(prompts, Sequence):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a string, token ids, chat messages or a list of these"
            + (" (decode bytes first)." if isinstance(prompts, _BYTES) else ".")
        )
    if not prompts:
        raise ValueError("prompts is an empty list; give at least one prompt (an empty prompt is refused as well).")
    if _is_tokens(prompts) or _is_chat(prompts):
        return [prompts]
    # Each is checked when it is encoded.
    listed = [_array_ids(item, f"prompt {i}") if _is_array(item) else item for i, item in enumerate(prompts)]
    return cast(list[Prompt], listed)


def _is_array(value: object) -> TypeGuard[npt.ArrayLike]:
    """Whether it is an array of NumPy or of a library that speaks its protocol; a single number is none."""
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def _array_ids(array: npt.ArrayLike, name: str) -> list[int]:
    """The token ids in an array."""
    values = np.asarray(array)
    if values.ndim != 1:
        raise ValueError(
            f"{name} is an array of shape {values.shape}; give a 1-D array of token ids for a prompt, and a list of "
            "them for several."
        )
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} is an array of {values.dtype}; token ids are integers.")
    return values.tolist()


def _is_tokens(prompt: object) -> TypeGuard[list[int]]:
    """Whether it is a sequence of integers (NumPy's count); an empty one is."""
    if isinstance(prompt, (str, *_BYTES)) or not isinstance(prompt, Sequence):
        return False
    return all(hasattr(item, "__index__") and not isinstance(item, bool) and not _is_array(item) for item in prompt)


def _is_chat(prompt: object) -> TypeGuard[list[Message]]:
    return isinstance(prompt, Sequence) and all(isinstance(item, dict) for item in prompt)


def encode_prompt(prompt: Prompt, index: int, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of a prompt.

    Raises:
        TypeError: it is no prompt.
        ValueError: it needs a tokenizer and there is none, or the tokenizer refuses it.
    """
    if _is_tokens(prompt):
        return [int(token) for token in prompt]
    if isinstance(prompt, _BYTES) or not (isinstance(prompt, str) or _is_chat(prompt)):
        raise TypeError(
            f"prompt {index} is a {type(prompt).__name__}; give a string, token ids, or chat messages (dicts), "
            + ("and decode bytes first." if isinstance(prompt, _BYTES) else "not a mixture.")
        )
    if tokenizer is None:
        kind = "text" if isinstance(prompt, str) else "chat messages"
        raise ValueError(f"prompt {index} is {kind}, and skip_tokenizer_init=True; give token ids.")
    try:
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
    except TypeError as error:
        raise TypeError(f"prompt {index}: {error}") from error
    except ValueError as error:
        raise ValueError(f"prompt {index}: {error}") from error


def params_for(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt.

    Raises:
        TypeError: an item is no SamplingParams.
        ValueError: there are more or fewer than prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise TypeError(f"params must be SamplingParams, or a list of them, not {type(params).__name__}.")
    listed = list(params)
    wrong = next((item for item in listed if not isinstance(item, SamplingParams)), None)
    if wrong is not None:
        raise TypeError(f"params holds a {type(wrong).__name__}; give SamplingParams.")
    if len(listed) != num_prompts:
        raise ValueError(f"{len(listed)} params for {num_prompts} prompts; give one for all, or one for each.")
    return listed


@dataclasses.dataclass
class _Answer:
    """A completion in the making."""

    request: Request
    stream: TextStream
    splitter: ReasoningSplitter | None
    text: list[str] = dataclasses.field(default_factory=list)
    reasoning: list[str] = dataclasses.field(default_factory=list)
    num_streamed: int = 0  # tokens handed out
    pieces_streamed: int = 0  # of the text and of the reasoning

    def add(self, text: str) -> None:
        """Takes text that is sure."""
        self._add(("", text) if self.splitter is None else self.splitter.push(text))

    def finish(self) -> None:
        """Takes what was held back."""
        self.add(self.stream.finish())
        if self.splitter is not None:
            self._add(self.splitter.finish())

    def new(self) -> tuple[str, str]:
        """Reasoning and text that were not handed out yet."""
        start, self.pieces_streamed = self.pieces_streamed, len(self.text)
        return "".join(self.reasoning[start:]), "".join(self.text[start:])

    def _add(self, parts: tuple[str, str]) -> None:
        self.reasoning.append(parts[0])
        self.text.append(parts[1])


class Call:
    """Turns the progress of a call's requests into chunks, and finished prompts into outputs.

    Attributes:
        ready: chunks that nobody took yet.
        error: what went wrong while its text was made; it ends the call.

    Args:
        prompts: as given.
        params: one for each prompt.
        call_id: makes request ids unique.
        tokenizer: None where only token ids are used.
        rules: what the engine can serve.
        rng: gives seeds to requests that bring none.
        parser: of a reasoning model.

    Raises:
        ValueError: a prompt or its parameters cannot be served; nothing has been started then.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        call_id: int,
        tokenizer: Tokenizer | None,
        rules: RequestRules,
        rng: random.Random,
        parser: ReasoningParser | None = None,
    ):
        self._prompts = list(prompts)
        self._tokenizer, self._parser = tokenizer, parser
        self.ready: deque[StreamChunk] = deque()
        self.error: Exception | None = None
        self._answers: dict[str, _Answer] = {}
        self._done: list[list[Completion]] = [[] for _ in prompts]
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            ids = encode_prompt(prompt, index, tokenizer)
            made = make_requests(ids, one, rules, request_id=f"{call_id}/{index}", prompt_index=index, rng=rng)
            for request in made:
                self._answers[request.id] = _Answer(request, self._text_stream(one), self._splitter(ids))
        self._num_open = len(self._answers)

    def _text_stream(self, params: SamplingParams) -> TextStream:
        tokenizer, skip = self._tokenizer, params.skip_special_tokens
        decode = None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=skip)
        return TextStream(decode, params.stop, params.include_stop_str_in_output, min_tokens=params.min_tokens)

    def _splitter(self, prompt_ids: list[int]) -> ReasoningSplitter | None:
        return (
            None if self._parser is None else ReasoningSplitter(self._parser, prompt_end(self._decode_all, prompt_ids))
        )

    def _decode_all(self, token_ids: list[int]) -> str:
        """Text with its special tokens; a parser needs a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=False)

    @property
    def requests(self) -> list[Request]:
        """Every request of the call."""
        return [answer.request for answer in self._answers.values()]

    @property
    def is_done(self) -> bool:
        """Whether every prompt has its output among the chunks."""
        return not self._num_open

    def take(self, progress: Progress) -> StopHit | None:
        """Adds what a request emitted, and makes its chunk.

        Returns:
            The stop string that ends it, if there is one. The caller then cuts the request to the tokens that the hit
            keeps, and calls `close`.
        """
        answer = self._answers[progress.request.id]
        ids = progress.token_ids
        if progress.finish == "stop" and not answer.request.params.include_stop_str_in_output:
            ids = ids[:-1]  # the stop token ends the text, it is not part of it
        text, hit = answer.stream.push(ids)
        answer.add(text)
        if hit is None and progress.finish is None:
            # Not the request's outputs: in v1 they may already include those of the next progress.
            self._emit(answer, progress.token_ids)
        return hit

    def close(self, request: Request) -> None:
        """Makes the last chunk of a finished request, and of its prompt where it was the last completion."""
        answer = self._answers[request.id]
        answer.finish()
        completions = self._done[request.prompt_index]
        completions.append(self._completion(answer))
        output = None
        if len(completions) == request.params.n:
            output = self._output(request)
        new = request.output_ids[answer.num_streamed :]
        self._emit(answer, new, finish_reason=request.finish_reason, output=output)
        self._num_open -= 1

    def _completion(self, answer: _Answer) -> Completion:
        request, splitter = answer.request, answer.splitter
        if splitter is None:
            return request.completion("".join(answer.text))
        num_tokens = splitter.num_tokens(self._decode_all, request.output_ids)
        reasoning = "".join(answer.reasoning)
        return request.completion("".join(answer.text), reasoning=reasoning, reasoning_tokens=num_tokens)

    def _emit(
        self,
        answer: _Answer,
        token_ids: list[int],
        *,
        finish_reason: FinishReason | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        answer.num_streamed += len(token_ids)
        reasoning, text = answer.new()
        chunk = StreamChunk(
            prompt_index=answer.request.prompt_index,
            completion_index=answer.request.index,
            text=text,
            token_ids=list(token_ids),
            finish_reason=finish_reason,
            output=output,
            reasoning=None if answer.splitter is None else reasoning,
        )
        self.ready.append(chunk)

    def _output(self, request: Request) -> RequestOutput:
        completions = sorted(self._done[request.prompt_index], key=lambda completion: completion.index)
        first = next(one for one in self.requests if one.prompt_index == request.prompt_index)
        return RequestOutput(
            request_id=request.id.rsplit("/", 1)[0],
            prompt=self._prompts[request.prompt_index],
            prompt_token_ids=list(request.prompt_ids),
            completions=tuple(completions),
            prompt_logprobs=list(first.prompt_logprobs) if first.wants_prompt_logprobs else None,
        )
