"""How the engine runs, as a user sets it."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jaxspec.checks import (
    MAX_INT32,
    check_bool,
    check_choice,
    check_functions,
    check_int,
    check_ints,
    check_optional_ints,
    check_path,
    check_real,
    set_checked,
)
from jaxspec.reasoning import PARSERS
from jaxspec.sampling_params import MAX_LOGPROBS, MAX_SEED
from jaxspec.static_tree import MAX_NODES

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8")
ATTENTION_BACKENDS = ("auto", "xla", "cpu", "pallas_tpu", "pallas_gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs, with or without speculation. None is an automatic value, said in the plan.

    Attributes:
        dtype: of weights, activations and caches.
        weight_dtype: what weights that are multiplied are stored as, of `WEIGHT_DTYPES`; "auto" is dtype. Another one
            makes them smaller and the output another model's: by the CPU's kernels, which compute in float32.
        max_model_len: most tokens of a prompt and its output; at most what the model was built for.
        page_size: tokens in a page of the KV cache.
        max_total_tokens: tokens the KV pool holds.
        max_running_requests: completions decoded together.
        max_queued_requests: completions that may wait; None is no limit.
        chunked_prefill_size: tokens of a prompt computed in one step; None or -1 (None once built) is all of them.
        decode_row_buckets: batch sizes that decoding is compiled for. Sorted once built.
        prefill_chunk_buckets: chunk lengths that prefill is compiled for. Sorted once built.
        prefix_caching: take over the pages of an earlier request that began alike instead of computing them again.
        rounds_per_dispatch: rounds the device runs before the host looks.
        disable_overlap_schedule: wait for each round (v1) instead of overlapping one (v2).
        enable_dp_attention: data-parallel attention; refused by name in this version.
        skip_tokenizer_init: run on token ids alone.
        reasoning_parser: tells the reasoning of a model from its answer; one of `jaxspec.reasoning.PARSERS`.
        random_seed: draws the seeds of requests that bring none.
        warmup: compile every shape before the first request.
        progress: show progress bars; None is only when stderr is a terminal.
        compilation_cache_dir: where compiled programs are kept; "auto" is the user's cache folder, None keeps none.
        attention_backend: what attends to the KV cache, of `ATTENTION_BACKENDS`; one that is named runs or is refused.
        scan_layers: stack equal layers and scan over them.
        max_stop_token_ids: most stop ids a request may have, the model's own included.
        max_logprobs: most top log-probabilities a request may ask for.
        max_logit_bias: most tokens whose logits a request may bias; 0 compiles none of it.
        max_bad_words: most bad words of two tokens and more a request may have; 0 compiles none of it.
        max_bad_word_tokens: longest bad word, in tokens.
        logits_processors: name -> a pure JAX function that requests may name: of a draw's logits, float32 [V], and of
            its row (`jaxspec.adjust.RowTokens`), to logits. A draft tree's nodes are drawn with the drafts on their own
            path for tokens, so that the output is that of plain decoding. Pairs once built.
        simulate_accept_len: for benchmarks alone: rounds accept drafts unseen, so that they emit so many tokens on
            average; the output is then not the model's. At most three decimals.

    Raises:
        TypeError: a value has the wrong Python type.
        ValueError: a value is out of range, or two values contradict each other.
    """

    dtype: str = "auto"
    weight_dtype: str = "auto"
    max_model_len: int | None = None
    page_size: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    chunked_prefill_size: int | None = 512
    decode_row_buckets: Sequence[int] | None = None
    prefill_chunk_buckets: Sequence[int] | None = None
    prefix_caching: bool = True
    rounds_per_dispatch: int = 1
    disable_overlap_schedule: bool = False
    enable_dp_attention: bool = False
    skip_tokenizer_init: bool = False
    reasoning_parser: str | None = None
    random_seed: int = 0
    warmup: bool = True
    progress: bool | None = None
    compilation_cache_dir: str | os.PathLike[str] | None = "auto"
    attention_backend: str = "auto"
    scan_layers: bool | None = None
    max_stop_token_ids: int = 16
    max_logprobs: int = MAX_LOGPROBS
    max_logit_bias: int = 300
    max_bad_words: int = 32
    max_bad_word_tokens: int = 8
    logits_processors: Mapping[str, Callable[..., Any]] | Sequence[Any] = ()
    simulate_accept_len: float | None = None

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if self.chunked_prefill_size == -1:
            set_checked(self, chunked_prefill_size=None)
        # A prompt token and an output token are the least that a context and a pool can be for.
        lows = {"max_model_len": 2, "max_total_tokens": 2, "page_size": 1, "max_running_requests": 1}
        check_optional_ints(self, lows, "set None for the automatic value", high=MAX_INT32)
        check_optional_ints(self, {"max_queued_requests": 1, "chunked_prefill_size": 1}, "set None for no limit")
        set_checked(
            self,
            rounds_per_dispatch=check_int("rounds_per_dispatch", self.rounds_per_dispatch, low=1, high=MAX_INT32),
            random_seed=check_int("random_seed", self.random_seed, low=0, high=MAX_SEED),
            max_stop_token_ids=check_int("max_stop_token_ids", self.max_stop_token_ids, low=1, high=MAX_INT32),
            max_logprobs=check_int("max_logprobs", self.max_logprobs, low=0, high=MAX_LOGPROBS),
            max_logit_bias=check_int("max_logit_bias", self.max_logit_bias, low=0, high=MAX_INT32),
            max_bad_words=check_int("max_bad_words", self.max_bad_words, low=0, high=MAX_INT32),
            max_bad_word_tokens=check_int("max_bad_word_tokens", self.max_bad_word_tokens, low=2, high=MAX_INT32),
            logits_processors=check_functions("logits_processors", self.logits_processors),
        )
        for name in (
            "disable_overlap_schedule",
            "enable_dp_attention",
            "skip_tokenizer_init",
            "warmup",
            "prefix_caching",
        ):
            check_bool(name, getattr(self, name))
        if self.reasoning_parser is not None:
            check_choice("reasoning_parser", self.reasoning_parser, tuple(PARSERS))
            if self.skip_tokenizer_init:
                raise ValueError(
                    f"reasoning_parser={self.reasoning_parser!r} reads text, and skip_tokenizer_init=True gives none; "
                    "leave one of them out."
                )
        for name in ("progress", "scan_layers"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.compilation_cache_dir is not None:
            set_checked(self, compilation_cache_dir=check_path("compilation_cache_dir", self.compilation_cache_dir))
        if self.simulate_accept_len is not None:
            set_checked(self, simulate_accept_len=_check_accept_len(self.simulate_accept_len))
        self._check_buckets()

    @property
    def processors(self) -> dict[str, Callable[..., Any]]:
        """`logits_processors` by name, in their order."""
        return dict(cast(Sequence[tuple[str, Callable[..., Any]]], self.logits_processors))

    def _check_buckets(self) -> None:
        """Sorts the buckets, and checks that the largest holds what it has to."""
        holds = {"decode_row_buckets": "max_running_requests", "prefill_chunk_buckets": "chunked_prefill_size"}
        for name, limit_name in holds.items():
            if getattr(self, name) is None:
                continue
            buckets = tuple(sorted(check_ints(name, getattr(self, name), low=1)))
            if not buckets:
                raise ValueError(f"{name} is empty; set at least one size, or None for automatic ones.")
            limit = getattr(self, limit_name)
            if limit is not None and buckets[-1] < limit:
                raise ValueError(
                    f"{name}={list(buckets)} ends below {limit_name}={limit}; "
                    f"add a bucket of at least {limit}, or set {limit_name}={buckets[-1]}."
                )
            set_checked(self, **{name: buckets})


def _check_accept_len(value: object) -> float:
    """Returns a mean number of tokens of a round."""
    length = check_real("simulate_accept_len", value)
    if not 1 <= length <= MAX_NODES + 1 or round(length, 3) != length:
        raise ValueError(
            f"simulate_accept_len={length:g} must be from 1 to {MAX_NODES + 1} with at most three decimals; "
            "set None to accept what the target accepts."
        )
    return length
