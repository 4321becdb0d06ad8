"""What the caller gets back for a prompt."""

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
# What output is to plain decoding's: the same tokens; tokens by the same law; or neither, for the sake of speed.
Exactness = Literal["token", "law", "lossy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probability of a token of the output or the prompt, and of the best at its position (`top`, best first)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on one monotonic clock; None for what did not happen."""

    arrival: float
    first_token: float | None
    finished: float | None

    @property
    def ttft(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def total(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished completion of a prompt.

    Attributes:
        text: of the answer alone where there is a reasoning parser.
        logprobs: one entry for each of `token_ids`; None when they were not asked for.
        finish_reason: "stop" (a stop token or stop string), "length" (the budget or the context) or "abort".
        stop_reason: the stop string, or the stop token's id; None for the other finish reasons.
        rounds: verify rounds that emitted tokens.
        accept_length: tokens emitted by rounds / rounds; None without a round.
        accepted_per_position: entry j is how many rounds accepted at least j + 1 drafts.
        exactness: "token" where the tokens are those of plain decoding, "law" where they follow its law, or "lossy".
        reasoning: what came before the answer; None without a reasoning parser.
        reasoning_tokens: how many of `token_ids` that took, the mark of its end included; likewise.
        simulate_accept_len: where acceptance was simulated (see `EngineConfig`): then neither tokens nor text are the
            model's, and the counts are what was asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    rounds: int
    accept_length: float | None
    accepted: int
    proposed: int
    accepted_per_position: list[int]
    exactness: Exactness
    timings: Timings
    reasoning: str | None = None
    reasoning_tokens: int | None = None
    simulate_accept_len: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All completions of one prompt; the properties are those of the first.

    Attributes:
        prompt: the prompt as it was given (text, token ids or chat messages).
        prompt_logprobs: one entry for each of `prompt_token_ids`, None for the first; None when not asked for.
    """

    request_id: str
    prompt: object
    prompt_token_ids: list[int]
    completions: tuple[Completion, ...]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def reasoning(self) -> str | None:
        return self.completions[0].reasoning

    @property
    def reasoning_tokens(self) -> int | None:
        return self.completions[0].reasoning_tokens

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.completions[0].stop_reason

    @property
    def accept_length(self) -> float | None:
        return self.completions[0].accept_length

    @property
    def accepted_per_position(self) -> list[int]:
        return self.completions[0].accepted_per_position

    @property
    def exactness(self) -> Exactness:
        return self.completions[0].exactness

    @property
    def rounds(self) -> int:
        return self.completions[0].rounds

    @property
    def timings(self) -> Timings:
        return self.completions[0].timings

    @property
    def simulate_accept_len(self) -> float | None:
        return self.completions[0].simulate_accept_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """New text and tokens of one completion.

    Attributes:
        finish_reason: None until the last chunk of this completion.
        output: the whole output, on the last chunk of the prompt only.
        reasoning: new text of the reasoning; None without a reasoning parser.
    """

    prompt_index: int
    completion_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
    reasoning: str | None = None
