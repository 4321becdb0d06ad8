"""Static sizes of a draft tree, and the form of one that is fixed beforehand."""

import dataclasses
import functools
from collections import defaultdict
from typing import NamedTuple

import numpy as np

Path = tuple[int, ...]  # never empty


class Tables(NamedTuple):
    """A static tree in the numbering of `grow`: topk candidates below the root, then width * topk for each level."""

    run: np.ndarray  # int32 [num_steps, width]; row d: which candidates of level d are run, 0 where there are fewer
    chosen: np.ndarray  # int32 [num_nodes - 1], ascending: which of all candidates are the tree


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A tree of fixed form: each node is a path of ranks from the root, (0, 2) the third best child of the best.

    Args:
        paths: sorted by length, then rank; with each path its beginnings (see `jaxspec.static_tree`).
    """

    paths: tuple[Path, ...]

    @property
    def num_steps(self) -> int:
        return len(self.paths[-1])

    @property
    def topk(self) -> int:
        """Children scored per node."""
        return 1 + max(path[-1] for path in self.paths)

    @functools.cached_property
    def inner(self) -> list[list[Path]]:
        """Nodes with children, by depth; the root aside."""
        levels: dict[int, dict[Path, None]] = defaultdict(dict)
        for path in self.paths:
            if len(path) > 1:
                levels[len(path) - 1][path[:-1]] = None
        return [sorted(levels[depth]) for depth in range(1, self.num_steps)]

    @property
    def width(self) -> int:
        """Nodes run per level."""
        return max((len(level) for level in self.inner), default=1)

    @property
    def tables(self) -> Tables:
        run = np.zeros((self.num_steps, self.width), np.int32)
        for depth, level in enumerate(self.inner):
            run[depth, : len(level)] = [self._place(path) for path in level]
        sizes = np.cumsum([0, self.topk] + [self.width * self.topk] * (self.num_steps - 1))
        chosen = sorted(int(sizes[len(path) - 1]) + self._place(path) for path in self.paths)
        return Tables(run, np.array(chosen, np.int32))

    def _place(self, path: Path) -> int:
        """Its index among the candidates of its level."""
        *above, rank = path
        parent = self.inner[len(above) - 1].index(tuple(above)) if above else 0
        return parent * self.topk + rank


class TreeShape(NamedTuple):
    """Static sizes of a tree, whose form is chosen anew each round unless `static` fixes it."""

    num_steps: int  # longest path, in drafts
    topk: int  # children scored per node
    num_nodes: int  # root included
    static: StaticTree | None = None
    scores_chain: bool = False  # give a chain its scores too, which cost a pass over the vocabulary

    @property
    def width(self) -> int:
        """Nodes run per level."""
        return self.topk if self.static is None else self.static.width

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def is_scored(self) -> bool:
        """Whether children come with scores, which a choice among them needs."""
        return self.topk > 1 or self.scores_chain


class Shaped:
    """What a method says of its trees, by the one shape that they have."""

    shape: TreeShape

    @property
    def num_steps(self) -> int:
        return self.shape.num_steps

    @property
    def num_draft_tokens(self) -> int:
        return self.shape.num_nodes

    @property
    def is_chain(self) -> bool:
        return self.shape.is_chain
