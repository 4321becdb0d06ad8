"""Which draft method runs, and whether the draft checkpoint fits the target."""

from collections.abc import Collection
from typing import NamedTuple

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.plan import REQUESTED, WARNING, DraftInfo, Note, TargetInfo
from jaxspec.sglang_flags import flag_of

KNOWN_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
WITH_DRAFT_MODEL = ("EAGLE", "EAGLE3", "STANDALONE")
AVAILABLE_ACCEPT_RULES = ("coupled", "rejection", "target_only")


class SettingNames(NamedTuple):
    """The settings that a method came from, for messages."""

    algorithm: str = "algorithm"
    draft_model: str = "draft_model"


NAMES = SettingNames()


def choose_algorithm(
    spec: SpecConfig, target: TargetInfo, available: Collection[str], notes: list[Note], names: SettingNames = NAMES
) -> str:
    """Returns the draft method, aliases resolved: NEXTN is EAGLE with the target's own head.

    Args:
        names: of the settings that the user has for what `spec` calls algorithm and draft_model.

    Raises:
        ValueError: the algorithm or the accept rule is unknown or not in this version, or the draft model it needs is
            missing, or it has no use for the one given.
    """
    algorithm = spec.algorithm
    ready = ", ".join(sorted(available)) or "none"
    if algorithm not in KNOWN_ALGORITHMS and algorithm not in available:
        known = ", ".join(dict.fromkeys([*KNOWN_ALGORITHMS, *sorted(available)]))
        raise ValueError(
            f"{names.algorithm}={algorithm!r} is not known; set one of {known} (in this version: {ready})."
        )
    if algorithm not in available:
        raise ValueError(f"{names.algorithm}={algorithm!r} is not in this version; set one of {ready}.")
    if spec.accept_rule not in AVAILABLE_ACCEPT_RULES:
        raise ValueError(
            f"accept_rule={spec.accept_rule!r} is not offered: it changes what the model would say, by a bound that "
            "depends on the entropy; set 'coupled', which is exact token for token, or 'target_only' with thresholds."
        )
    if algorithm == "NEXTN":
        _check_own_head(spec, target, names)
        notes.append(Note(names.algorithm, "NEXTN", "EAGLE", "NEXTN is EAGLE with the target's own draft head (MTP)"))
        return "EAGLE"
    if algorithm == "EAGLE" and spec.draft_model is None and target.num_mtp_layers > 0 and "NEXTN" in available:
        notes.append(
            Note(names.draft_model, None, None, "no draft model is set, so the target's own head (MTP) drafts")
        )
        return algorithm
    if algorithm in WITH_DRAFT_MODEL and spec.draft_model is None:
        raise ValueError(
            f"{names.algorithm}={algorithm!r} needs a draft model; set draft_model ({flag_of('draft_model_path')})."
        )
    if algorithm == "NGRAM" and spec.draft_model is not None:
        raise ValueError(
            f"{names.draft_model}={str(spec.draft_model)!r} has no use with {names.algorithm}='NGRAM', which drafts "
            f"from the text itself; leave it out, or set {names.algorithm}='STANDALONE'."
        )
    return algorithm


def _check_own_head(spec: SpecConfig, target: TargetInfo, names: SettingNames) -> None:
    if target.num_mtp_layers < 1:
        raise ValueError(
            f"{names.algorithm}='NEXTN' needs a target with its own draft head, and {target.architecture} has "
            f"num_mtp_layers={target.num_mtp_layers}; set EAGLE, EAGLE3 or STANDALONE with a "
            f"{names.draft_model}, or NGRAM."
        )
    if spec.draft_model is not None:
        raise ValueError(
            f"{names.draft_model}={str(spec.draft_model)!r} has no use with {names.algorithm}='NEXTN', which drafts "
            f"with the target's own head; leave it out, or set {names.algorithm}='EAGLE'."
        )


def inspect_draft(
    spec: SpecConfig,
    engine: EngineConfig,
    target: TargetInfo,
    draft: DraftInfo | None,
    max_model_len: int,
    notes: list[Note],
    names: SettingNames = NAMES,
) -> None:
    """Adds notes on what the draft checkpoint lacks; `names` as for `choose_algorithm`.

    Raises:
        ValueError: the draft cannot draft for this target, or is of another kind than the algorithm drafts with.
    """
    if spec.draft_model is None:
        return
    if draft is None:
        raise ValueError(
            f"{names.draft_model}={str(spec.draft_model)!r} is set, and nothing is known of it; pass its DraftInfo."
        )
    _check_kind(spec, draft, names)
    if spec.algorithm == "STANDALONE":
        _check_tokenizer(spec, engine, target, draft, notes, names)
    if draft.max_position is not None and draft.max_position < max_model_len:
        reason = (
            f"the draft model was built for {draft.max_position} positions and max_model_len={max_model_len}: beyond "
            f"them fewer drafts may be accepted, with the same output; set max_model_len={draft.max_position} to stay "
            "inside"
        )
        notes.append(Note("draft_max_position", draft.max_position, draft.max_position, reason, WARNING))


def _check_kind(spec: SpecConfig, draft: DraftInfo, names: SettingNames) -> None:
    """Refuses a feature head whose name says that another algorithm reads it: it would load, and accept nothing."""
    suffix = next((suffix for suffix in ("Eagle3", "Eagle") if draft.architecture.endswith(suffix)), None)
    wants = {"Eagle3": "EAGLE3", "Eagle": "EAGLE", None: None}[suffix]
    if wants is not None and spec.algorithm in WITH_DRAFT_MODEL and spec.algorithm != wants:
        raise ValueError(
            f"{names.draft_model}={str(spec.draft_model)!r} is a {draft.architecture}, which "
            f"{names.algorithm}={spec.algorithm!r} does not draft with; set {names.algorithm}={wants!r}."
        )


def _check_tokenizer(
    spec: SpecConfig,
    engine: EngineConfig,
    target: TargetInfo,
    draft: DraftInfo,
    notes: list[Note],
    names: SettingNames,
) -> None:
    """Refuses a draft with another tokenizer; vocabularies may differ in padding only."""
    if target.tokenizer_hash is None or draft.tokenizer_hash is None:
        reason = (
            f"the tokenizers of target (vocabulary {target.vocab_size}) and draft ({draft.vocab_size}) could not be "
            "compared; with different ones the output stays right, and hardly a draft is accepted"
        )
        kind = REQUESTED if engine.skip_tokenizer_init else WARNING
        notes.append(Note("draft_tokenizer", "not compared", "not compared", reason, kind))
        return
    if target.tokenizer_hash != draft.tokenizer_hash:
        raise ValueError(
            f"{names.draft_model}={str(spec.draft_model)!r} has another tokenizer than the target (fingerprint "
            f"{draft.tokenizer_hash:.12}, not {target.tokenizer_hash:.12}); set a {names.draft_model} with the "
            f"target's own tokenizer, or {names.algorithm}='NGRAM'."
        )
    if target.vocab_size != draft.vocab_size:
        common = min(target.vocab_size, draft.vocab_size)
        reason = f"the tokenizer is the same and the padding is not: the first {common} ids are drafted"
        notes.append(Note("draft_vocab_size", draft.vocab_size, common, reason))


def check_recurrent(spec: SpecConfig, is_tree: bool, target: TargetInfo, drafts: Collection[DraftInfo | None]) -> None:
    """Raises ValueError for what a recurrent state cannot do.

    It has one past: nodes of a tree with several would need one state each. And a draft model of its own is fed the
    bonus token ahead of the target and again after the verdict, which a state would take in twice.
    """
    if target.has_recurrent_state and is_tree:
        form = (
            "merge" if spec.merge is not None else "static_tree" if spec.static_tree is not None else "eagle_topk > 1"
        )
        raise ValueError(
            f"{target.architecture} has layers with a recurrent state, which verify chains and no trees, and {form} "
            "drafts a tree; set eagle_topk=1, and neither static_tree nor merge."
        )
    for draft in drafts:
        if draft is not None and draft.has_recurrent_state:
            raise ValueError(
                f"a draft model of {draft.architecture} has layers with a recurrent state: not supported; set a draft "
                "model without, NEXTN for a target with its own draft head, or NGRAM."
            )


def check_topk(spec: SpecConfig, algorithm: str, topk: int, target: TargetInfo, draft: DraftInfo | None) -> None:
    """Raises ValueError where a node cannot have `topk` children, as there are fewer tokens to choose from.

    A lookup chooses among places of the text, of which there may be any number.
    """
    if algorithm == "NGRAM":
        return
    most = target.vocab_size if draft is None else min(target.vocab_size, draft.num_tokens)
    if topk <= most:
        return
    if spec.static_tree is not None:
        what, advice = f"static_tree has rank {topk - 1}", f"set ranks from 0 to {most - 1}"
    else:
        what, advice = f"eagle_topk={topk}", f"set it to at most {most}"
    raise ValueError(f"{what}, and the draft chooses from {most} tokens; {advice}.")
