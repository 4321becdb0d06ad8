"""One completion in flight, and how a prompt becomes requests."""

import dataclasses
import enum
import random
from collections.abc import Sequence

from jaxspec.config import SamplingParams
from jaxspec.metrics import Emission, RoundStats
from jaxspec.outputs import Completion, Exactness, FinishReason, RequestOutput, StreamChunk, Timings, TokenLogprobs
from jaxspec.request_rules import RequestRules, check_adjustments, processor_arguments

__all__ = [
    "Completion",
    "FinishReason",
    "Request",
    "RequestOutput",
    "RequestRules",
    "Status",
    "StreamChunk",
    "Timings",
    "TokenLogprobs",
    "completion_seed",
    "make_requests",
]

MASK64 = (1 << 64) - 1


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """One completion in flight. The scheduler alone changes it.

    Attributes:
        id: unique among all completions; `abort` takes it.
        prompt_index, index: which prompt of the call, and which of its completions.
        budget: most tokens it may emit, at least 0.
        stop_ids: tokens that end it; the stop token is emitted and counted.
        processors: place of each user's processor that applies -> its numbers.
        exactness: what its outputs are to those of plain decoding.
        output_ids: emitted tokens the host knows of.
        logprobs: one entry for each of `output_ids` where `params.logprobs` is not None, else empty.
        prompt_logprobs: one entry for each token of the prompt that was prefilled so far, where they are wanted; None
            for the first, which nothing comes before.
        emissions: what each retired step added; their counts add up to `len(output_ids)`.
        order: admission order, smaller is older.
        row, pages: where it sits on the device; None and [] unless RUNNING.
        epoch: how often it was preempted; results of an earlier epoch are dropped.
        prefill_ids: the tokens that this epoch has to prefill.
        prefilled: how many of them were dispatched.
        prefill_in_flight: the last chunk was dispatched and its token is not yet known.
        in_flight: rounds dispatched and not retired.
        simulate_accept_len: see `Completion`.
        num_adopted: tokens of `prefill_ids` that were in pages already, and are not computed.
        page_names: of the first pages of its sequence, see `jaxspec.prefix`.
        num_named: how many of its pages have got their names in the pool.
    """

    id: str
    prompt_index: int
    index: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    budget: int
    stop_ids: tuple[int, ...]
    processors: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    exactness: Exactness = "token"
    output_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=lambda: [None])
    emissions: list[Emission] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    status: Status = Status.WAITING
    order: int = -1
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    epoch: int = 0
    prefill_ids: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    prefill_in_flight: bool = False
    in_flight: int = 0
    num_adopted: int = 0
    page_names: list[bytes] = dataclasses.field(default_factory=list)
    num_named: int = 0
    arrival: float = 0.0
    first_token: float | None = None
    finished: float | None = None
    simulate_accept_len: float | None = None

    @property
    def sequence(self) -> list[int]:
        """Prompt and known outputs: what a prefill has to compute."""
        return self.prompt_ids + self.output_ids

    @property
    def known_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_len(self) -> int:
        """Longest that prompt and output together can become."""
        return len(self.prompt_ids) + self.budget

    @property
    def min_len(self) -> int:
        """A token at an absolute position below this may not be a stop; the first output is at len(prompt_ids)."""
        return len(self.prompt_ids) + self.params.min_tokens

    @property
    def remaining(self) -> int:
        return self.budget - len(self.output_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Of several completions, the first finds them for all."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether its prompt has to be computed for it, although the pages of another may hold it."""
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def can_decode(self) -> bool:
        """Whether a round may add to it: its prefill is dispatched, and what is in flight may leave budget."""
        # A prefill that ends emits one token and each round at least one, or the request finishes.
        sure = len(self.output_ids) + self.prefill_in_flight + self.in_flight
        whole = self.prefilled == len(self.prefill_ids)
        return self.status is Status.RUNNING and whole and sure < self.budget

    def completion(self, text: str, *, reasoning: str | None = None, reasoning_tokens: int | None = None) -> Completion:
        """The result of a finished request; `text` comes from its `TextStream`, see `Completion` for the others.

        Raises:
            RuntimeError: it is not finished.
        """
        if self.finish_reason is None:
            raise RuntimeError(f"request {self.id} is {self.status.value}; only a finished request has a completion.")
        stats = RoundStats.of(self.emissions)
        return Completion(
            index=self.index,
            text=text,
            token_ids=list(self.output_ids),
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            rounds=stats.rounds,
            accept_length=stats.accept_length,
            accepted=stats.accepted,
            proposed=stats.proposed,
            accepted_per_position=stats.accepted_per_position,
            exactness=self.exactness,
            timings=Timings(arrival=self.arrival, first_token=self.first_token, finished=self.finished),
            reasoning=reasoning,
            reasoning_tokens=reasoning_tokens,
            simulate_accept_len=self.simulate_accept_len,
        )


def make_requests(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    rules: RequestRules,
    *,
    request_id: str,
    prompt_index: int = 0,
    rng: random.Random,
) -> list[Request]:
    """Makes one Request for each of the prompt's `params.n` completions, with ids "<request_id>/<index>".

    Args:
        rng: gives the seed when `params.seed` is None.

    Raises:
        ValueError: the prompt is empty, too long or outside the vocabulary, or the params exceed the rules.
    """
    prompt = [int(token) for token in prompt_ids]
    _check_prompt(prompt, params, rules, prompt_index)
    stop_ids = _stop_ids(params, rules)
    check_adjustments(params, rules, stop_ids)
    processors = processor_arguments(params, rules)
    room = rules.max_model_len - len(prompt)
    budget = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = rng.getrandbits(64) if params.seed is None else params.seed
    return [
        Request(
            id=f"{request_id}/{index}",
            prompt_index=prompt_index,
            index=index,
            prompt_ids=prompt,
            params=params,
            seed=completion_seed(seed, index),
            budget=budget,
            stop_ids=stop_ids,
            processors=processors,
            exactness=rules.exactness if params.temperature > 0 or rules.simulate_accept_len else "token",
            simulate_accept_len=rules.simulate_accept_len,
        )
        for index in range(params.n)
    ]


def completion_seed(seed: int, index: int) -> int:
    """Seed of the index-th completion, 0..2**64 - 1: the seed itself for the first, a mix of both for the others."""
    if index == 0:
        return seed & MASK64
    # Weyl step by the golden ratio, then two multiply-xorshift rounds (splitmix64), so that the seeds of
    # neighbouring requests and completions do not meet.
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
    return mixed ^ (mixed >> 31)


def _check_prompt(prompt: list[int], params: SamplingParams, rules: RequestRules, prompt_index: int) -> None:
    if not prompt:
        raise ValueError(f"prompt {prompt_index} is empty; give at least one token.")
    # A prompt that fills the context is only of use when nothing is to be generated.
    if len(prompt) + (params.max_tokens != 0) > rules.max_model_len:
        raise ValueError(
            f"prompt {prompt_index} has {len(prompt)} tokens, which leaves no room to generate in "
            f"max_model_len={rules.max_model_len}; shorten it or set max_model_len higher."
        )
    room = rules.max_model_len - len(prompt)
    if params.min_tokens > room:
        raise ValueError(
            f"prompt {prompt_index} has {len(prompt)} tokens, which leaves room for {room} in "
            f"max_model_len={rules.max_model_len}, fewer than min_tokens={params.min_tokens}; set min_tokens to at "
            f"most {room}, shorten the prompt, or set max_model_len higher."
        )
    wrong = next((token for token in prompt if not 0 <= token < rules.vocab_size), None)
    if wrong is not None:
        raise ValueError(
            f"prompt {prompt_index} has token id {wrong}; this model's ids are 0..{rules.vocab_size - 1}. "
            "Was it encoded with another tokenizer?"
        )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > rules.max_logprobs:
            raise ValueError(
                f"{name}={wanted} is more than max_logprobs={rules.max_logprobs}; "
                f"ask for fewer or set EngineConfig(max_logprobs={wanted})."
            )


def _stop_ids(params: SamplingParams, rules: RequestRules) -> tuple[int, ...]:
    eos_ids = () if params.ignore_eos else rules.eos_ids
    stop_ids = tuple(dict.fromkeys([*eos_ids, *params.stop_token_ids]))
    wrong = next((token for token in params.stop_token_ids if not 0 <= token < rules.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"stop_token_ids has {wrong}; this model's ids are 0..{rules.vocab_size - 1}.")
    if len(stop_ids) > rules.max_stop_token_ids:
        raise ValueError(
            f"{len(stop_ids)} stop tokens (end-of-sequence tokens included) are more than "
            f"max_stop_token_ids={rules.max_stop_token_ids}; give fewer or set "
            f"EngineConfig(max_stop_token_ids={len(stop_ids)})."
        )
    if params.min_tokens and sum(0 <= token < rules.vocab_size for token in stop_ids) == rules.vocab_size:
        raise ValueError(
            f"min_tokens={params.min_tokens} rules out the stop tokens, and all {rules.vocab_size} ids of this model "
            "are stop tokens, so that none could be emitted; set min_tokens=0 or fewer stop_token_ids."
        )
    return stop_ids
