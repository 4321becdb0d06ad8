"""Model families: architecture name in a checkpoint's config -> class that runs it."""

from jaxspec.models.config import KNOWN_ARCHITECTURES, ModelConfig
from jaxspec.models.decoder import Decoder

# Families differ in their layers' kinds and switches, which are the config's (`jaxspec.models.families`).
MODELS: dict[str, type[Decoder]] = dict.fromkeys(KNOWN_ARCHITECTURES, Decoder)

__all__ = ["MODELS", "Decoder", "ModelConfig"]
