"""Reads model files: Hugging Face folders and GGUF files. `jaxspec.loading.load` turns them into model leaves."""

from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.embedded import find_embedded_model

__all__ = ["Checkpoint", "find_embedded_model", "open_checkpoint"]
