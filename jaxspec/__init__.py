"""Speculative decoding for JAX: the same tokens as plain decoding, in fewer passes over the model.

    from jaxspec import LLM, SamplingParams, SpecConfig

    with LLM("smollm2", spec=SpecConfig(algorithm="NGRAM")) as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0.0))[0].text)

The names below are imported on first use, so that `import jaxspec.config` alone loads no jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.config import EngineConfig, SamplingParams, SpecConfig
    from jaxspec.llm import LLM
    from jaxspec.outputs import RequestOutput

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "SpecConfig", "__version__"]

_HOME = {
    "LLM": "jaxspec.llm",
    "EngineConfig": "jaxspec.config",
    "RequestOutput": "jaxspec.outputs",
    "SamplingParams": "jaxspec.config",
    "SpecConfig": "jaxspec.config",
}


if not TYPE_CHECKING:  # a type checker that saw this would take any name for a public one

    def __getattr__(name: str) -> Any:
        """Imports a public name from the module that defines it, and keeps it."""
        if name not in _HOME:
            raise AttributeError(f"module 'jaxspec' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
