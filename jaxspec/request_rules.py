"""What an engine can serve, and whether a request's wishes for its logits fit."""

import dataclasses
from collections.abc import Iterable

from jaxspec.config import SamplingParams
from jaxspec.outputs import Exactness
from jaxspec.sampling_params import MAX_PROCESSOR_ARGUMENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What the engine can serve; `make_requests` refuses the rest.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are below this.
        eos_ids: end-of-sequence tokens of the model.
        max_stop_token_ids, ..., max_bad_word_tokens: widths of the device's arrays.
        processors: names of the engine's logits processors, in its order.
        exactness: of sampled output, see `SpecPlan.exactness`.
        simulate_accept_len: see `Completion`.
    """

    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    max_stop_token_ids: int = 16
    max_logprobs: int = 20
    max_logit_bias: int = 300
    max_bad_words: int = 32
    max_bad_word_tokens: int = 8
    processors: tuple[str, ...] = ()
    exactness: Exactness = "token"
    simulate_accept_len: float | None = None


def check_adjustments(params: SamplingParams, rules: RequestRules, stop_ids: tuple[int, ...]) -> None:
    """Raises ValueError if biases or bans do not fit the rules, or could leave nothing to emit."""
    allowed = params.allowed_token_ids
    words = [tuple(word) for word in params.bad_words_ids]
    _check_ids("logit_bias", (token for token, _ in params.biases), rules)
    _check_ids("allowed_token_ids", allowed or (), rules)
    _check_ids("bad_words_ids", (token for word in words for token in word), rules)
    _check_number("logit_bias", len(params.biases), "max_logit_bias", rules.max_logit_bias)
    # A word of one token is a bit like any other banned token.
    longer = [word for word in words if len(word) > 1]
    _check_number("bad_words_ids of two tokens and more", len(longer), "max_bad_words", rules.max_bad_words)
    longest = max(map(len, longer), default=0)
    if longest > rules.max_bad_word_tokens:
        raise ValueError(
            f"bad_words_ids has a word of {longest} tokens, more than max_bad_word_tokens={rules.max_bad_word_tokens}; "
            f"leave it out or set EngineConfig(max_bad_word_tokens={longest})."
        )
    if allowed is None and not words:
        return
    free = set(range(rules.vocab_size)) if allowed is None else set(allowed)
    free -= {word[-1] for word in words}
    if params.min_tokens:
        free -= set(stop_ids)
    if not free:
        raise ValueError(
            "allowed_token_ids, the last tokens of bad_words_ids and (with min_tokens) the stop tokens could leave "
            "nothing to emit; allow at least one token that is none of these."
        )


def processor_arguments(params: SamplingParams, rules: RequestRules) -> dict[int, tuple[float, ...]]:
    """Place of each processor that the request asks for -> its numbers.

    Raises:
        ValueError: the engine has no such processor, or there are too many numbers for one.
    """
    found: dict[int, tuple[float, ...]] = {}
    for name, numbers in params.processors:
        if name not in rules.processors:
            known = ", ".join(rules.processors) or "none"
            raise ValueError(
                f"logits_processors has {name!r}, and the engine's are: {known}; "
                "give it to EngineConfig(logits_processors={...}) under that name."
            )
        if len(numbers) > MAX_PROCESSOR_ARGUMENTS:
            most = MAX_PROCESSOR_ARGUMENTS
            raise ValueError(f"logits_processors[{name!r}] has {len(numbers)} numbers; give at most {most}.")
        found[rules.processors.index(name)] = numbers
    return found


def _check_ids(name: str, tokens: Iterable[int], rules: RequestRules) -> None:
    wrong = next((token for token in tokens if not 0 <= token < rules.vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{name} has {wrong}; this model's ids are 0..{rules.vocab_size - 1}.")


def _check_number(name: str, number: int, setting: str, most: int) -> None:
    if number > most:
        raise ValueError(
            f"{number} {name} are more than {setting}={most}; give fewer or set EngineConfig({setting}={number})."
        )
