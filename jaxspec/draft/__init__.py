"""Draft methods by name. A new method is a file and a line here."""

from jaxspec.draft.base import DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.standalone import Standalone

DRAFTS: dict[str, type] = {
    "NONE": Plain,
    "NGRAM": Ngram,
    "STANDALONE": Standalone,
    "EAGLE": Feature,
    "EAGLE3": Feature,
}
# Those that draft a tree where eagle_topk > 1.
TREE_ALGORITHMS = tuple(name for name in DRAFTS if name != "NONE")

__all__ = ["DRAFTS", "TREE_ALGORITHMS", "DraftMethod"]
