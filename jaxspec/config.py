"""Frozen settings, checked once when they are built; user errors are raised here."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxspec.checks import (
    MAX_INT32,
    check_bool,
    check_choice,
    check_functions,
    check_instance,
    check_int,
    check_ints,
    check_optional_ints,
    check_path,
    check_real,
    set_checked,
)
from jaxspec.reasoning import PARSERS
from jaxspec.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from jaxspec.static_tree import MAX_NODES, check_static_tree

if TYPE_CHECKING:
    from jaxspec.resolve import DraftInfo, SpecPlan, TargetInfo


__all__ = ["MAX_LOGPROBS", "MAX_SEED", "EngineConfig", "SamplingParams", "SpecConfig", "check_settings"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "int8")
ATTENTION_BACKENDS = ("auto", "xla", "cpu", "pallas_tpu", "pallas_gpu")
# A lookup compares every length of suffix: each makes the compiled step longer.
MAX_NGRAM = 64
ACCEPT_RULES = ("coupled", "rejection", "target_only", "typical")
THRESHOLDS = ("accept_threshold_single", "accept_threshold_acc")


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


def _check_method(name: str, value: object, hint: str) -> str:
    """Returns the name of a draft method in upper case."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, not {type(value).__name__}.")
    method = value.strip().upper()
    if method in ("", "NONE"):
        raise ValueError(f"{name}={value!r} names no draft method; {hint}.")
    return method


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """How drafts are made and scheduled. `resolve` turns it into a plan without open values.

    Attributes:
        algorithm: a draft method, e.g. "NGRAM", "STANDALONE", "EAGLE3"; upper-cased.
        draft_model: folder or file of the draft checkpoint, for methods that need one.
        num_steps: longest draft path, in tokens; one round commits 1..num_steps + 1 tokens.
        eagle_topk: branches kept per step; 1 is a chain.
        num_draft_tokens: nodes of the draft tree, root included; with `merge`, of both methods' tree.
        static_tree: a tree of fixed form instead of the best nodes of each round: its nodes as ranks from the root on,
            [[0], [1], [0, 0]] is the two best tokens and what follows the best; or a JSON file of them. A tuple of
            tuples, sorted by length, once built.
        merge: a second draft method, whose chain fills the same tree; upper-cased.
        merge_draft_model: its draft checkpoint, for methods that need one.
        merge_num_steps: length of its chain.
        overlap_trees: lets trees (eagle_topk > 1, or merged) run on the overlapped schedule (v2).
        strict: turns every override, fallback and warning of the plan into an error.
        accept_rule: "coupled" gives the output of plain decoding, token for token. "rejection" (chains) and
            "target_only" give its law, and other tokens than plain decoding draws; greedy requests get the same tokens
            by any rule.
        block_verification: has "rejection" judge a chain as a whole: more drafts are accepted, by the same law.
        accept_threshold_single: "target_only" accepts a draft that the target gives this probability, above 0 to 1.
            Below 1 it is lossy: the output no longer follows the target's law.
        accept_threshold_acc: the same of the sum of a draft's and its siblings' probabilities, which is divided by it.
        shared_noise: sampled drafts are drawn with the noise of the target's own draw, and so agree with it more often;
            False draws them with noise of their own, to measure what sharing gives. The output is the same.
        ngram_max_match: longest suffix that NGRAM looks up.
        ngram_min_match: shortest suffix that NGRAM looks up.

    Raises:
        TypeError: a value has the wrong Python type.
        ValueError: a value is out of range, or two values contradict each other.
    """

    algorithm: str = "EAGLE3"
    draft_model: str | os.PathLike[str] | None = None
    num_steps: int | None = None
    eagle_topk: int | None = None
    num_draft_tokens: int | None = None
    static_tree: Sequence[Sequence[int]] | str | os.PathLike[str] | None = None
    merge: str | None = None
    merge_draft_model: str | os.PathLike[str] | None = None
    merge_num_steps: int | None = None
    overlap_trees: bool = False
    strict: bool = False
    accept_rule: str = "coupled"
    block_verification: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    shared_noise: bool = True
    ngram_max_match: int = 3
    ngram_min_match: int = 1

    def __post_init__(self) -> None:
        set_checked(self, algorithm=_check_method("algorithm", self.algorithm, "pass spec=None for plain decoding"))
        if self.merge is not None:
            set_checked(self, merge=_check_method("merge", self.merge, "leave it out to draft by one method"))
        for name in ("draft_model", "merge_draft_model"):
            if getattr(self, name) is not None:
                set_checked(self, **{name: check_path(name, getattr(self, name))})
        hint = "leave it out for the automatic value"
        lows = {"num_steps": 1, "eagle_topk": 1, "merge_num_steps": 1}
        check_optional_ints(self, lows, hint, high=MAX_NODES)
        # A round verifies the root, which this counts, and at least one draft.
        check_optional_ints(self, {"num_draft_tokens": 2}, hint, high=MAX_NODES + 1)
        if self.static_tree is not None:
            set_checked(self, static_tree=check_static_tree(self.static_tree))
        for name in ("merge_draft_model", "merge_num_steps"):
            if self.merge is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs merge; set it to a draft method, or leave both out."
                )
        check_bool("overlap_trees", self.overlap_trees)
        check_bool("strict", self.strict)
        check_bool("shared_noise", self.shared_noise)
        self._check_rule()
        shortest = check_int("ngram_min_match", self.ngram_min_match, low=1)
        longest = check_int("ngram_max_match", self.ngram_max_match, low=1, high=MAX_NGRAM)
        if shortest > longest:
            raise ValueError(
                f"ngram_min_match={shortest} is more than ngram_max_match={longest}; "
                f"set ngram_max_match to at least {shortest}."
            )
        set_checked(self, ngram_min_match=shortest, ngram_max_match=longest)

    def _check_rule(self) -> None:
        check_choice("accept_rule", self.accept_rule, ACCEPT_RULES)
        check_bool("block_verification", self.block_verification)
        if self.block_verification and self.accept_rule != "rejection":
            raise ValueError(
                f"block_verification=True is an option of accept_rule='rejection', not of {self.accept_rule!r}; "
                "set that rule, or leave it out."
            )
        for name in THRESHOLDS:
            threshold = check_real(name, getattr(self, name))
            if not 0 < threshold <= 1:
                raise ValueError(f"{name}={threshold} must be above 0 and at most 1; set 1 for no loss.")
            if threshold < 1 and self.accept_rule != "target_only":
                raise ValueError(
                    f"{name}={threshold} is lossy, and accept_rule={self.accept_rule!r} is not; "
                    "set accept_rule='target_only', or leave it out."
                )
            set_checked(self, **{name: threshold})

    @classmethod
    def from_sglang(cls, **flags: object) -> "SpecConfig":
        """Builds the settings from SGLang's flags, named without the `speculative_` prefix.

        A flag at SGLang's own default asks for nothing and is accepted; any other value is mapped, or refused by name.

        Raises:
            ValueError: a flag is unknown, or asks for what this library does not do; the message says what to use.
        """
        from jaxspec.sglang_flags import translate

        return cls(**translate(flags))

    def resolve(
        self,
        engine: EngineConfig,
        target: "TargetInfo",
        draft: "DraftInfo | None",
        env: Mapping[str, str],
        **context: Any,
    ) -> "SpecPlan":
        """Returns the plan; see `jaxspec.resolve.resolve` for `context`, notes and errors."""
        from jaxspec.resolve import resolve

        return resolve(self, engine, target, draft, env, **context)


def check_settings(spec: object, engine: object) -> tuple[SpecConfig | None, EngineConfig]:
    """Returns both settings, with the default engine for None.

    Raises:
        TypeError: one is neither None nor of its class.
    """
    if spec is not None:
        hint = 'set spec=SpecConfig(algorithm="NGRAM"), for example, or None for plain decoding'
        spec = check_instance("spec", spec, SpecConfig, hint=hint)
    if engine is None:
        return spec, EngineConfig()
    return spec, check_instance("engine", engine, EngineConfig, hint="set engine=EngineConfig(...), or None")
