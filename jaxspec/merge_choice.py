"""The second method of a merged tree: which one, how long its chain is, and how many nodes both share."""

import dataclasses
import os
from typing import NamedTuple

from jaxspec.config import SpecConfig
from jaxspec.draft_choice import WITH_DRAFT_MODEL, SettingNames
from jaxspec.plan import Note
from jaxspec.static_tree import MAX_NODES
from jaxspec.tree_shape import TreeShape, check_steps

# Automatic length of the second chain: a lookup's copy is right for long or not at all.
MERGED_STEPS = 7
# What a user calls the second method.
MERGED_NAMES = SettingNames("merge", "merge_draft_model")


class Merge(NamedTuple):
    """A second method's chain in the same tree; the fields are those of `SpecPlan`."""

    merge: str | None = None
    merge_draft_model: str | None = None
    merge_num_steps: int = 0


def second_method(spec: SpecConfig) -> SpecConfig:
    """The settings of the method that is merged in, so that it is checked as the first one is.

    Raises:
        ValueError: it could add nothing to the first one, or lacks its checkpoint.
    """
    if spec.merge in WITH_DRAFT_MODEL and spec.merge_draft_model is None:
        raise ValueError(f"merge={spec.merge!r} needs a draft model of its own; set merge_draft_model.")
    second = dataclasses.replace(
        spec,
        algorithm=str(spec.merge),
        draft_model=spec.merge_draft_model,
        merge=None,
        merge_draft_model=None,
        merge_num_steps=None,
    )
    if (second.algorithm, second.draft_model) == (spec.algorithm, spec.draft_model):
        raise ValueError(f"merge={spec.merge!r} adds nothing to algorithm={spec.algorithm!r}; set another method.")
    return second


def choose_merge(second: SpecConfig, steps: int | None, max_model_len: int, notes: list[Note]) -> Merge:
    """The method and the length of its chain.

    Raises:
        ValueError: the chain is as long as the context.
    """
    if steps is None:
        steps = max(1, min(MERGED_STEPS, max_model_len - 1))
        notes.append(Note("merge_num_steps", None, steps, "automatic; set merge_num_steps"))
    check_steps("merge_num_steps", steps, max_model_len)
    return Merge(second.algorithm, None if second.draft_model is None else os.fspath(second.draft_model), steps)


def merged_shape(spec: SpecConfig, own: TreeShape, steps: int, notes: list[Note]) -> TreeShape:
    """The shape of a tree that a chain of `steps` drafts shares with the first method's `own`.

    Args:
        own: its num_draft_tokens is of no account where the tree is grown, because the user's number is of both.

    Raises:
        ValueError: num_draft_tokens holds less than the longest path, or more than both have.
    """
    first = own.capacity if spec.static_tree is None else own.num_draft_tokens
    least, most = max(own.num_steps, steps) + 1, min(first + steps, MAX_NODES + 1)
    nodes = spec.num_draft_tokens
    if nodes is None:
        reason = "all drafts of both methods, and the root; fewer keep the likeliest"
        notes.append(Note("num_draft_tokens", None, most, reason))
        return own._replace(num_draft_tokens=most)
    if not least <= nodes <= most:
        raise ValueError(
            f"num_draft_tokens={nodes} does not suit a tree of num_steps={own.num_steps} and "
            f"eagle_topk={own.eagle_topk} merged with a chain of merge_num_steps={steps}; set from {least} to {most}."
        )
    return own._replace(num_draft_tokens=nodes)
