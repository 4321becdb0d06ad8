"""Turns one form of checkpoint into another: head dialects, GGUF into a Hugging Face folder, and to Orbax and back."""

from jaxspec.loading.convert.gguf import DEQUANTISED_DTYPES, gguf_to_hf
from jaxspec.loading.convert.head import DIALECTS, convert_head
from jaxspec.loading.convert.orbax import hf_to_orbax, orbax_to_hf
from jaxspec.loading.convert.output import Summary

__all__ = ["DEQUANTISED_DTYPES", "DIALECTS", "Summary", "convert_head", "gguf_to_hf", "hf_to_orbax", "orbax_to_hf"]
