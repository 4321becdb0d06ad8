"""How one prompt is continued, as a user sets it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxspec.checks import (
    MAX_INT32,
    check_arguments,
    check_biases,
    check_bool,
    check_int,
    check_ints,
    check_optional_ints,
    check_real,
    check_sequences,
    check_strings,
    set_checked,
)

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_COMPLETIONS = 4096
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_LOGIT_BIAS = 100.0
MAX_PROCESSOR_ARGUMENTS = 8
# Below this, logits divided by the temperature leave the range of float32, so that nothing but 0 means greedy.
MIN_TEMPERATURE = 1e-5
# Above this, all tokens are equally likely in float32, and not much further its own range ends.
MAX_TEMPERATURE = 1e10

# What other libraries take and this one does not. A reason that begins with "use" names the setting to use instead.
_ABSENT = "not supported in this version; leave it out"
_CONSTRAINED = "not supported in this version, which has no constrained output; leave it out"
UNSUPPORTED = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "use max_tokens"),
    "min_new_tokens": "use min_tokens",
    "stop_strings": "use stop",
    **dict.fromkeys(("eos_token_id", "stop_token_id"), "use stop_token_ids"),
    **dict.fromkeys(("num_return_sequences", "num_completions"), "use n"),
    **dict.fromkeys(("random_seed", "sampling_seed"), "use seed"),
    "top_logprobs": "use logprobs",
    "no_stop_trim": "use include_stop_str_in_output",
    "do_sample": "use temperature, which is 0 for greedy",
    "spaces_between_special_tokens": "use skip_special_tokens; no spaces are put between tokens",
    "detokenize": "use EngineConfig(skip_tokenizer_init=True) to work on token ids alone",
    "bad_words": "use bad_words_ids, with the token ids of each word",
    "logits_processor": "use logits_processors",
    "custom_params": "use logits_processors, which takes numbers for each",
    **dict.fromkeys(("no_repeat_ngram_size", "typical_p", "stop_regex", "truncate_prompt_tokens"), _ABSENT),
    **dict.fromkeys(("output_kind", "extra_args", "best_of", "length_penalty", "early_stopping"), _ABSENT),
    **dict.fromkeys(("use_beam_search", "num_beams"), _ABSENT),
    **dict.fromkeys(("guided_decoding", "structured_outputs", "response_format"), _CONSTRAINED),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "structural_tag"), _CONSTRAINED),
}

_Settings = TypeVar("_Settings")


def refuse_by_name(unsupported: Mapping[str, str]) -> Callable[[type[_Settings]], type[_Settings]]:
    """Decorates a class so that arguments it does not have, and people know from elsewhere, are refused with a reason.

    Args:
        unsupported: name -> the end of the message. Other unknown names are left to Python.
    """

    def decorate(settings: type[_Settings]) -> type[_Settings]:
        build: Callable[..., None] = settings.__init__

        @functools.wraps(build)
        def init(self: _Settings, *args: Any, **values: Any) -> None:
            for name in values:
                if name in unsupported:
                    reason = unsupported[name]
                    raise TypeError(f"{name}: {reason}." if reason.startswith("use ") else f"{name} is {reason}.")
            build(self, *args, **values)

        setattr(settings, "__init__", init)  # noqa: B010  (a type checker refuses the plain assignment)
        return settings

    return decorate


@refuse_by_name(UNSUPPORTED)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    Attributes:
        temperature: 0 is greedy, else 1e-5 to 1e10.
        top_p: keeps the smallest set of tokens whose probability reaches it, in (0, 1]; 1 is off.
        top_k: keeps the k likeliest tokens, at most 2**31 - 1; -1, 0 and any k from the vocabulary's size on are off.
        min_p: drops tokens below this fraction of the likeliest one's probability, in [0, 1); 0 is off.
        seed: makes a sampled output repeatable; None lets the engine draw one.
        max_tokens: most tokens to emit; None is up to the context length.
        min_tokens: no stop token ends the output before this many tokens.
        stop: a string, or strings, that end the output. A tuple once built.
        stop_token_ids: token ids that end the output, besides the model's own. A tuple once built.
        ignore_eos: whether the model's own end-of-text tokens are emitted like any other.
        n: completions per prompt.
        logprobs: None is none, 0 the emitted token's, k the k likeliest tokens' as well. They are of the model's own
            law, before anything of this class is applied to it.
        prompt_logprobs: the same for the prompt's tokens but the first; it needs max_tokens to be at least 1.
        presence_penalty: subtracted from the logits of tokens in the output so far, from -2 to 2; 0 is off.
        frequency_penalty: subtracted once for each time that a token is in the output so far, from -2 to 2; 0 is off.
        repetition_penalty: divides positive logits of tokens in the prompt or the output so far, and multiplies their
            negative ones, above 0 to 10; 1 is off. It comes before the other two, as elsewhere.
        logit_bias: token id -> what is added to its logit, from -100 to 100, before the penalties. Sorted pairs once
            built.
        allowed_token_ids: the only tokens that may be emitted, stop tokens included; None is all. A tuple once built.
        bad_words_ids: token sequences that the output never contains; what the prompt ends with is no part of them.
            A tuple of tuples once built.
        logits_processors: names of `EngineConfig.logits_processors` -> the numbers that each is given for this request;
            a sequence of names gives none. Sorted pairs once built.
        speculate: False emits this request's tokens one a round, whatever the rows beside it do.
        skip_special_tokens: whether special tokens are left out of the text.
        include_stop_str_in_output: whether the text keeps the stop string that ended it.

    Raises:
        TypeError: a value has the wrong Python type, or an argument is one of `UNSUPPORTED`.
        ValueError: a value is out of range, or two values contradict each other.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words_ids: Sequence[Sequence[int]] = ()
    logits_processors: Mapping[str, Sequence[float]] | Sequence[Any] = ()
    speculate: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_law()
        self._check_adjustments()
        set_checked(
            self,
            min_tokens=check_int("min_tokens", self.min_tokens, low=0),
            stop=check_strings("stop", self.stop),
            stop_token_ids=check_ints("stop_token_ids", self.stop_token_ids, low=0),
            n=check_int("n", self.n, low=1, high=MAX_COMPLETIONS, hint="send a prompt several times for more"),
        )
        if self.seed is not None:
            set_checked(self, seed=check_int("seed", self.seed, low=0, high=MAX_SEED))
        check_optional_ints(self, {"max_tokens": 0}, "set None to go on up to the context length")
        for name in ("logprobs", "prompt_logprobs"):
            check_optional_ints(self, {name: 0}, "set None for no log-probabilities", high=MAX_LOGPROBS)
        for name in ("ignore_eos", "speculate", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        self._check_agreement()

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is once built."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def processors(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        """`logits_processors` as it is once built."""
        return cast(tuple[tuple[str, tuple[float, ...]], ...], self.logits_processors)

    def _check_law(self) -> None:
        """Checks the values that shape the distribution a token is drawn from."""
        temperature = check_real("temperature", self.temperature)
        top_p, min_p = check_real("top_p", self.top_p), check_real("min_p", self.min_p)
        if temperature != 0 and temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature={temperature} must be 0 or at least {MIN_TEMPERATURE}; set 0 for greedy.")
        if temperature > MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={temperature} must be at most {MAX_TEMPERATURE:g}, where all tokens are equally likely; "
                "set it lower."
            )
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must be in (0, 1]; set 1 to switch it off.")
        if not 0 <= min_p < 1:
            raise ValueError(f"min_p={min_p} must be in [0, 1); set 0 to switch it off, or temperature=0 for greedy.")
        top_k = check_int("top_k", self.top_k, low=-1, high=MAX_INT32, hint="set -1 or 0 to switch it off")
        set_checked(self, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)

    def _check_adjustments(self) -> None:
        """Checks what is done to the logits before a token is drawn."""
        for name in ("presence_penalty", "frequency_penalty"):
            value = check_real(name, getattr(self, name))
            if abs(value) > MAX_PENALTY:
                raise ValueError(
                    f"{name}={value} must be from -{MAX_PENALTY} to {MAX_PENALTY}; set 0 to switch it off."
                )
            set_checked(self, **{name: value})
        repetition = check_real("repetition_penalty", self.repetition_penalty)
        if not 0 < repetition <= MAX_REPETITION_PENALTY:
            limit = f"above 0 and at most {MAX_REPETITION_PENALTY}"
            raise ValueError(f"repetition_penalty={repetition} must be {limit}; set 1 to switch it off.")
        allowed = self.allowed_token_ids
        if allowed is not None:
            allowed = check_ints("allowed_token_ids", allowed, low=0)
            if not allowed:
                raise ValueError("allowed_token_ids is empty, so that nothing could be emitted; set None for no limit.")
        set_checked(
            self,
            repetition_penalty=repetition,
            logit_bias=check_biases("logit_bias", self.logit_bias, MAX_LOGIT_BIAS),
            allowed_token_ids=allowed,
            bad_words_ids=check_sequences("bad_words_ids", self.bad_words_ids),
            logits_processors=check_arguments("logits_processors", self.logits_processors),
        )

    def _check_agreement(self) -> None:
        """Checks values that are right alone and wrong together."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                f"set max_tokens to at least {self.min_tokens}, or min_tokens lower."
            )
        if self.prompt_logprobs is not None and self.max_tokens == 0:
            raise ValueError(
                f"prompt_logprobs={self.prompt_logprobs} needs the prompt to be computed, and max_tokens=0 computes "
                "nothing; set max_tokens to at least 1."
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} with temperature=0 gives {self.n} equal completions; set n=1 or a temperature."
            )
