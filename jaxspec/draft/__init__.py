"""Draft methods by name. A new method is a file and a line here."""

from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.standalone import Standalone
from jaxspec.draft.tree_draft import TreeDraft

DRAFTS: dict[str, type] = {
    "NONE": Plain,
    "NGRAM": Ngram,
    "STANDALONE": Standalone,
    "EAGLE": Feature,
    "EAGLE3": Feature,
}
# Those that grow a tree where eagle_topk > 1.
TREE_ALGORITHMS = tuple(name for name, method in DRAFTS.items() if issubclass(method, TreeDraft))

__all__ = ["DRAFTS", "TREE_ALGORITHMS", "DraftMethod"]
