"""SGLang's speculative flags, without the `speculative_` prefix: what each maps to, or why it is refused.

A flag at SGLang's own default asks for nothing and passes. Anything else is mapped or refused by name, so that nothing
a user carries over from SGLang is silently ignored.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

PREFIX = "speculative_"

# No field, but a value of accept_rule.
_REJECTION = "use_rejection_sampling"
# SGLang's name -> the field of SpecConfig. Two of SGLang's names may lead to one field.
MAPPED = {
    "algorithm": "algorithm",
    "draft_model_path": "draft_model",
    "draft_model": "draft_model",
    "num_steps": "num_steps",
    "eagle_topk": "eagle_topk",
    "num_draft_tokens": "num_draft_tokens",
    "ngram_min_match_window_size": "ngram_min_match",
    "ngram_max_match_window_size": "ngram_max_match",
    "use_rejection_sampling": _REJECTION,
    "use_block_verification": "block_verification",
    "accept_threshold_single": "accept_threshold_single",
    "accept_threshold_acc": "accept_threshold_acc",
}
# Fields that SGLang has no flag for; a caller may pass them along with SGLang's.
OWN_FIELDS = (
    *("static_tree", "merge", "merge_draft_model", "merge_num_steps"),
    *("overlap_trees", "strict", "accept_rule", "shared_noise", "ngram_min_match", "ngram_max_match"),
)
THRESHOLDS = ("accept_threshold_single", "accept_threshold_acc")  # of both


class Refused(NamedTuple):
    """A flag this library does not have."""

    defaults: tuple[object, ...]  # values that ask for nothing, besides None
    reason: str  # why it is refused, and what to use instead


_OWN_TEXT = "NGRAM looks up the request's own prompt and output, and keeps no table between requests; leave it out"
_BRANCHES = "the width of a draft tree is set by eagle_topk and num_draft_tokens; use those"
_ADAPTIVE = "num_steps stays the same for a whole run in this version; compare values with scripts/bench_decode.py"
_BLOCK = "block drafters are not in this version; use EAGLE3, STANDALONE or NGRAM with num_steps"
_MOE = "mixture-of-experts layers have one implementation, for target and draft alike; leave it out"
_WINDOW = "the draft attends to its whole context; bound the context with max_model_len (--context-length)"

REFUSED = {
    "draft_model_revision": Refused(
        (), "checkpoints are read from local paths; download that revision and pass its folder as draft_model"
    ),
    "draft_load_format": Refused(
        ("auto",), "the format is read off the checkpoint (safetensors or GGUF), and random weights are not offered"
    ),
    "token_map": Refused((), "a reduced draft vocabulary is read from the EAGLE3 head itself; leave it out"),
    "attention_mode": Refused(
        ("prefill",), "verify and draft-extend share one attention, so there is nothing to choose; leave it out"
    ),
    "draft_attention_backend": Refused(
        (), "target and draft share one attention backend; set attention_backend (--attention-backend)"
    ),
    "dsa_topk_backend": Refused(("sgl-kernel",), "sparse-attention indexers are not in this version; leave it out"),
    "draft_kv_cache_dtype": Refused(("auto",), "the draft's cache has the engine's dtype; set dtype (--dtype)"),
    "draft_window_size": Refused((), _WINDOW),
    "draft_sink_size": Refused((), _WINDOW),
    "moe_runner_backend": Refused(("auto",), _MOE),
    "moe_a2a_backend": Refused(("none",), _MOE),
    "draft_model_quantization": Refused(
        ("unquant",), "the draft is computed in the engine's dtype; convert the checkpoint, or set dtype (--dtype)"
    ),
    "skip_dp_mlp_sync": Refused((False,), "data-parallel attention is not in this version; leave it out"),
    "adaptive": Refused((False,), _ADAPTIVE),
    "adaptive_config": Refused((), _ADAPTIVE),
    "enable_multi_layer_eagle": Refused(
        (False,), "one draft layer serves every step in this version; use algorithm EAGLE or EAGLE3 without it"
    ),
    "dflash_block_size": Refused((), _BLOCK),
    "dspark_block_size": Refused((), _BLOCK),
    "domino_candidate_pool_size": Refused((2048,), _BLOCK),
    "ngram_min_bfs_breadth": Refused((1,), _BRANCHES),
    "ngram_max_bfs_breadth": Refused((10,), _BRANCHES),
    "ngram_match_type": Refused(("BFS",), _BRANCHES),
    "ngram_max_trie_depth": Refused((18,), "the length of a draft is num_steps; set that"),
    "ngram_branch_length": Refused((18,), "the length of a draft is num_steps; set that"),
    "ngram_capacity": Refused((10_000_000,), _OWN_TEXT),
    "ngram_external_corpus_path": Refused((), _OWN_TEXT),
    "ngram_external_sam_budget": Refused((0,), _OWN_TEXT),
    "ngram_external_corpus_max_tokens": Refused((10_000_000,), _OWN_TEXT),
}
# Families of flags of which SGLang's versions have different ones.
REFUSED_PREFIXES = {"dspark_": _BLOCK, "dflash_": _BLOCK, "domino_": _BLOCK, "ngram_external_": _OWN_TEXT}

# SGLang's environment variables: never read here, so one that is set is worth a note.
SGLANG_ENVIRONMENT = {
    "SGLANG_ENABLE_SPEC_V2": "set JAXSPEC_ENABLE_SPEC_V2, or disable_overlap_schedule",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "nothing is planned beside the round here; unset it",
    "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "num_steps is at least 1 here; unset it",
    "SGLANG_SIMULATE_ACC_LEN": "set EngineConfig.simulate_accept_len, which no variable can",
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "set temperature=0 for greedy decoding",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probabilities have one definition here; unset it",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "a draft built for a shorter context is noted, not refused; unset it",
    "SGLANG_RAGGED_VERIFY_MODE": "every row verifies num_draft_tokens nodes; unset it",
    "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION": "data-parallel attention is not in this version; unset it",
}


def flag_of(name: str) -> str:
    """Returns the command-line flag of a name, e.g. `--speculative-num-steps` of `num_steps`."""
    prefix = "" if name == "enable_multi_layer_eagle" else PREFIX
    return "--" + (prefix + name).replace("_", "-")


def translate(flags: Mapping[str, object]) -> dict[str, Any]:
    """Returns the fields of SpecConfig that `flags` ask for; None asks for nothing.

    Raises:
        TypeError: use_rejection_sampling is neither True nor False.
        ValueError: a flag is unknown, refused, or given twice with different values; or there is no algorithm.
    """
    fields: dict[str, Any] = {}
    for given, value in flags.items():
        name = given.removeprefix(PREFIX)
        field = MAPPED.get(name, name if name in OWN_FIELDS else None)
        if value is None:
            _check_known(given, name, field)
        elif field is None:
            _check_asks_for_nothing(given, name, value)
        elif fields.setdefault(field, value) != value:
            raise ValueError(f"{given}={value!r} contradicts {field}={fields[field]!r}; give one of them.")
    if "algorithm" not in fields:
        raise ValueError(
            f"algorithm is missing; set it ({flag_of('algorithm')}), or pass spec=None for plain decoding."
        )
    _choose_rule(fields)
    return fields


def _choose_rule(fields: dict[str, Any]) -> None:
    """Names the accept rule that flags of SGLang stand for, unless it is named; `SpecConfig` checks that they agree."""
    asks_for_rejection = fields.pop(_REJECTION, False)
    if not isinstance(asks_for_rejection, bool):
        raise TypeError(f"{_REJECTION}={asks_for_rejection!r} must be True or False.")
    if asks_for_rejection and fields.setdefault("accept_rule", "rejection") != "rejection":
        raise ValueError(f"{_REJECTION}=True contradicts accept_rule={fields['accept_rule']!r}; give one of them.")
    if fields.get("block_verification") is True:
        fields.setdefault("accept_rule", "rejection")
    if any(fields.get(name, 1) != 1 for name in THRESHOLDS):
        fields.setdefault("accept_rule", "target_only")


def _is_refused(name: str) -> bool:
    return name in REFUSED or name.startswith(tuple(REFUSED_PREFIXES))


def _check_known(given: str, name: str, field: str | None) -> None:
    if field is None and not _is_refused(name):
        known = ", ".join([*MAPPED, *OWN_FIELDS])
        raise ValueError(f"{given} is not a speculative flag of SGLang or of jaxspec; the ones that work are {known}.")


def _check_asks_for_nothing(given: str, name: str, value: object) -> None:
    """Raises unless a flag that maps to nothing has a value that asks for nothing."""
    _check_known(given, name, None)
    # Types count: True is not the number 1.
    if name not in REFUSED or (type(value), value) not in [(type(d), d) for d in REFUSED[name].defaults]:
        reasons = (reason for prefix, reason in REFUSED_PREFIXES.items() if name.startswith(prefix))
        reason = REFUSED[name].reason if name in REFUSED else next(reasons)
        raise ValueError(f"{given}={value!r} ({flag_of(name)}) is refused: {reason}.")
