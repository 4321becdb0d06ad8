"""Whether the rule that judges drafts suits them, and what is said of one that changes the output."""

from jaxspec.config import THRESHOLDS, SpecConfig
from jaxspec.plan import REQUESTED, WARNING, Note

RULE_SETTINGS = ("accept_rule", "block_verification", *THRESHOLDS)


def check_rule(spec: SpecConfig, *, is_tree: bool, notes: list[Note]) -> None:
    """Adds a note where sampled output will not be that of plain decoding, token for token.

    Raises:
        ValueError: rejection sampling of a tree.
    """
    if spec.accept_rule == "rejection" and is_tree:
        raise ValueError(
            "accept_rule='rejection' judges chains, and the draft is a tree; set eagle_topk=1 and no merge, or "
            "accept_rule='coupled' or 'target_only'."
        )
    if spec.accept_rule != "coupled":
        reason = (
            "sampled output follows the model's law, and is not the output of plain decoding token for token; "
            "set 'coupled' for that"
        )
        notes.append(Note("accept_rule", spec.accept_rule, spec.accept_rule, reason, REQUESTED))
        if not spec.shared_noise:
            reason = f"no effect: accept_rule={spec.accept_rule!r} never shares noise with the drafts"
            notes.append(Note("shared_noise", False, None, reason, WARNING))
    for name in THRESHOLDS:
        threshold = getattr(spec, name)
        if threshold < 1:
            reason = "lossy: sampled output does not follow the model's law; set 1 for no loss"
            notes.append(Note(name, threshold, threshold, reason, REQUESTED))
