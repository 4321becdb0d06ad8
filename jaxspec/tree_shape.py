"""The three numbers of a draft tree: num_steps, eagle_topk and num_draft_tokens, from those a user gave.

A chain (eagle_topk=1) has num_draft_tokens = num_steps + 1, so one number gives the others. A tree has no natural
width, so all three are needed. A tree of fixed form has them all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxspec.config import SpecConfig
from jaxspec.plan import OVERRIDE, Note
from jaxspec.sglang_flags import flag_of


class TreeShape(NamedTuple):
    """What a round drafts and verifies."""

    num_steps: int  # longest draft path, in tokens
    eagle_topk: int  # branches kept per step; 1 is a chain
    num_draft_tokens: int  # nodes, root included

    @property
    def capacity(self) -> int:
        """Most nodes, root included: eagle_topk at depth 1, and eagle_topk children of each kept node below."""
        return self.eagle_topk + (self.num_steps - 1) * self.eagle_topk**2 + 1


CHAIN = TreeShape(3, 1, 4)
TREE = TreeShape(5, 4, 8)
PLAIN = TreeShape(0, 1, 1)  # plain decoding: a round verifies the root alone


def automatic_chain(max_model_len: int) -> tuple[TreeShape, str]:
    """The automatic chain and the reason for it: a shorter one where the context holds no path of its length."""
    steps = max(1, min(CHAIN.num_steps, max_model_len - 1))
    if steps == CHAIN.num_steps:
        return CHAIN, "automatic"
    return TreeShape(steps, 1, steps + 1), f"automatic: the longest chain that max_model_len={max_model_len} holds"


def fill_shape(spec: SpecConfig, automatic: TreeShape, reason: str, max_model_len: int) -> tuple[TreeShape, list[Note]]:
    """Returns the whole shape, with a note for each number that the user left open or that had to change.

    Args:
        automatic: the shape where the user gave no number; `reason` says why it is this one.
        max_model_len: what an automatic path has to fit.

    Raises:
        ValueError: the numbers given leave another one open (the message names its flag), or contradict each other.
    """
    paths = paths_of(spec)
    if paths is not None:
        return _static_shape(spec, paths)
    given = {name: getattr(spec, name) for name in TreeShape._fields}
    if all(value is None for value in given.values()):
        return automatic, [Note(name, None, getattr(automatic, name), reason) for name in TreeShape._fields]
    if spec.eagle_topk is None:
        _check_chain(spec)
    elif spec.eagle_topk > 1:
        missing = [f"{name} ({flag_of(name)})" for name, value in given.items() if value is None]
        if missing:
            raise ValueError(
                f"eagle_topk={spec.eagle_topk} drafts a tree, which needs {' and '.join(missing)}; "
                "set all three numbers, or eagle_topk=1 for a chain."
            )
    return _fill_chain_or_keep(spec, *automatic_chain(max_model_len))


def paths_of(spec: SpecConfig) -> tuple[tuple[int, ...], ...] | None:
    """The nodes of a tree of fixed form, as `SpecConfig` left them; None where there is none."""
    paths: Any = spec.static_tree
    return paths


def _static_shape(spec: SpecConfig, paths: Sequence[tuple[int, ...]]) -> tuple[TreeShape, list[Note]]:
    """The numbers of a tree of fixed form; those given have to be just these."""
    shape = TreeShape(len(paths[-1]), 1 + max(path[-1] for path in paths), 1 + len(paths))
    notes = []
    for name, value in shape._asdict().items():
        given = getattr(spec, name)
        if given is None:
            notes.append(Note(name, None, value, "of static_tree"))
        elif given != value:
            raise ValueError(f"{name}={given} is not what static_tree has, {value}; leave it out, or change the tree.")
    return shape, notes


def check_shape(shape: TreeShape) -> None:
    """Raises ValueError where no tree has this shape."""
    steps, topk, nodes = shape
    _check_path(steps, nodes)
    if nodes > shape.capacity:
        raise ValueError(
            f"num_draft_tokens={nodes} is more than the {shape.capacity} nodes a tree of num_steps={steps} and "
            f"eagle_topk={topk} can hold; set it to at most {shape.capacity}."
        )


def check_steps(name: str, steps: int, max_model_len: int) -> None:
    """Raises ValueError where a path, whose length is the setting `name`, is as long as the context."""
    if steps >= max_model_len:
        raise ValueError(
            f"{name}={steps} is as long as the context, max_model_len={max_model_len}; "
            f"set it to at most {max_model_len - 1}."
        )


def _check_path(steps: int, nodes: int) -> None:
    if nodes < steps + 1:
        raise ValueError(
            f"num_draft_tokens={nodes} cannot hold a path of num_steps={steps}; set it to at least {steps + 1}."
        )


def _check_chain(spec: SpecConfig) -> None:
    """Raises where num_steps and num_draft_tokens are not those of a chain, so that eagle_topk is a real question."""
    steps, nodes = spec.num_steps, spec.num_draft_tokens
    if steps is None or nodes is None:
        return
    _check_path(steps, nodes)
    if nodes > steps + 1:
        raise ValueError(
            f"num_steps={steps} with num_draft_tokens={nodes} needs eagle_topk ({flag_of('eagle_topk')}); "
            f"set it, or num_draft_tokens={steps + 1} for a chain."
        )


def _fill_chain_or_keep(spec: SpecConfig, chain: TreeShape, chain_reason: str) -> tuple[TreeShape, list[Note]]:
    """Fills what a chain leaves open; a tree with all three numbers stays as it is."""
    notes = []
    steps, topk, nodes = spec.num_steps, spec.eagle_topk, spec.num_draft_tokens
    if topk is None:
        topk = 1
        notes.append(Note("eagle_topk", None, 1, "a chain, as no branches are asked for; set eagle_topk"))
    if steps is None:
        steps = chain.num_steps if nodes is None else nodes - 1
        why = chain_reason if nodes is None else "a chain of num_draft_tokens - 1 drafts"
        notes.append(Note("num_steps", None, steps, why))
    if nodes is None:
        nodes = steps + 1
        notes.append(Note("num_draft_tokens", None, nodes, "eagle_topk=1 is a chain: num_steps + 1, root included"))
    elif topk == 1 and nodes != steps + 1:
        reason = "eagle_topk=1 is a chain: num_steps + 1, root included"
        notes.append(Note("num_draft_tokens", nodes, steps + 1, reason, OVERRIDE))
        nodes = steps + 1
    return TreeShape(steps, topk, nodes), notes
