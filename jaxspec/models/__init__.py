"""Model families: architecture name in a checkpoint's config -> class that runs it."""

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder

MODELS: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}

__all__ = ["MODELS", "Decoder", "ModelConfig"]
