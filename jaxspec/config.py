"""Frozen settings, checked once when they are built; user errors are raised here."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.checks import (
    check_bool,
    check_choice,
    check_instance,
    check_int,
    check_optional_ints,
    check_path,
    check_real,
    set_checked,
)
from jaxspec.engine_config import EngineConfig
from jaxspec.sampling_params import MAX_LOGPROBS, MAX_SEED, SamplingParams
from jaxspec.static_tree import MAX_NODES, check_static_tree

if TYPE_CHECKING:
    from jaxspec.resolve import DraftInfo, SpecPlan, TargetInfo


__all__ = ["MAX_LOGPROBS", "MAX_SEED", "EngineConfig", "SamplingParams", "SpecConfig", "check_settings"]

# A lookup compares every length of suffix: each makes the compiled step longer.
MAX_NGRAM = 64
ACCEPT_RULES = ("coupled", "rejection", "target_only", "typical")
THRESHOLDS = ("accept_threshold_single", "accept_threshold_acc")


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
