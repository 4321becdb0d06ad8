"""Draft methods by name. A new method is a file and a line here."""

from jaxspec.draft.base import DraftMethod
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.standalone import Standalone

DRAFTS: dict[str, type] = {"NONE": Plain, "NGRAM": Ngram, "STANDALONE": Standalone}

__all__ = ["DRAFTS", "DraftMethod"]
