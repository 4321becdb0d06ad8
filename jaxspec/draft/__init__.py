"""Draft methods by name. A new method is a file and a line here."""

from collections.abc import Callable

from jaxspec.draft.base import DraftMethod, DraftSettings
from jaxspec.draft.feature import Feature
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.standalone import Standalone
from jaxspec.models.network import Network

# Each makes the method for a resolved plan from its draft checkpoint's network, where it has one, and the target's
# vocabulary size.
DRAFTS: dict[str, Callable[[DraftSettings, Network | None, int], DraftMethod]] = {
    "NONE": Plain.create,
    "NGRAM": Ngram.create,
    "STANDALONE": Standalone.create,
    "EAGLE": Feature.create,
    "EAGLE3": Feature.create,
    "NEXTN": Feature.create,
}

__all__ = ["DRAFTS", "DraftMethod"]
