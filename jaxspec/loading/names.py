"""One dialect for the tensor names of checkpoints: prefixes of wrappers are dropped, and equal parts named equally."""

from collections.abc import Collection

from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES

# What a text model's "model." is inside a wrapper; the longest first.
_WRAPPERS = ("model.language_model.", "language_model.model.")
_RENAMED = {".shared_experts.": ".shared_expert."}
# Towers of wrappers, which read no text.
_TOWERS = ("model.visual.*", "visual.*")


def one_dialect(name: str) -> str:
    """The name that `Decoder.tensor_map` has for a tensor."""
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            name = "model." + name.removeprefix(prefix)
            break
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def stored_by_name(checkpoint: Checkpoint) -> dict[str, str]:
    """Name in the one dialect -> name in the checkpoint.

    Raises:
        ValueError: two tensors have one name.
    """
    stored: dict[str, str] = {}
    for name in checkpoint.shapes:
        ours = one_dialect(name)
        if ours in stored:
            raise ValueError(
                f"{checkpoint.path} holds {stored[ours]} and {name}, which are one tensor; leave one of them out."
            )
        stored[ours] = name
    return stored


def mtp_prefixes(names: Collection[str], num_layers: int) -> list[str]:
    """Prefixes of a model's own draft layers (multi-token prediction), in order; what is shared by them stands apart.

    Args:
        names: in the one dialect.
        num_layers: of the model; DeepSeek counts its own draft layers on from there.
    """
    found = {}
    for name in names:
        parts = name.split(".")
        for lead in (("mtp", "layers"), ("model", "layers")):
            if tuple(parts[:2]) == lead and len(parts) > 2 and parts[2].isdigit():
                number = int(parts[2])
                if lead[0] == "mtp" or number >= num_layers:
                    found[number] = ".".join(parts[:3]) + "."
    return [found[number] for number in sorted(found)]


def unread_names(names: Collection[str], config: ModelConfig) -> list[str]:
    """Glob patterns of what a checkpoint may hold beside the text model: its own draft layers, and other towers."""
    family = FAMILIES[config.architecture]
    own = [] if family.own_draft is None else ["mtp.*", *(f"{one}*" for one in mtp_prefixes(names, config.num_layers))]
    return [*own, *(_TOWERS if family.aliases else ())]
