"""How one prompt is continued, as a user sets it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.checks import (
    MAX_INT32,
    check_bool,
    check_int,
    check_ints,
    check_optional_ints,
    check_real,
    check_strings,
    set_checked,
)

MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
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
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), _ABSENT),
    **dict.fromkeys(("no_repeat_ngram_size", "typical_p", "logit_bias", "allowed_token_ids"), _ABSENT),
    **dict.fromkeys(("bad_words", "bad_words_ids", "stop_regex", "logits_processors"), _ABSENT),
    **dict.fromkeys(("logits_processor", "custom_params", "prompt_logprobs", "truncate_prompt_tokens"), _ABSENT),
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
        logprobs: None is none, 0 the emitted token's, k the k likeliest tokens' as well.
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
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        self._check_law()
        set_checked(
            self,
            min_tokens=check_int("min_tokens", self.min_tokens, low=0),
            stop=check_strings("stop", self.stop),
            stop_token_ids=check_ints("stop_token_ids", self.stop_token_ids, low=0),
            n=check_int("n", self.n, low=1),
        )
        if self.seed is not None:
            set_checked(self, seed=check_int("seed", self.seed, low=0, high=MAX_SEED))
        check_optional_ints(self, {"max_tokens": 0}, "set None to go on up to the context length")
        if self.logprobs is not None:
            hint = "set None for no log-probabilities"
            set_checked(self, logprobs=check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, hint=hint))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        self._check_agreement()

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

    def _check_agreement(self) -> None:
        """Checks values that are right alone and wrong together."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                f"set max_tokens to at least {self.min_tokens}, or min_tokens lower."
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} with temperature=0 gives {self.n} equal completions; set n=1 or a temperature."
            )
