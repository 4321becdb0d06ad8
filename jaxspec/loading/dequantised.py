"""Checkpoints in FP8 with a scale for each block, read as plain floats.

Whether a tensor is quantised is read off the file: it is stored in 8 bits and has scales beside it. The lists of
quantised modules in configs are not relied on: they are known to name what is not there and to miss what is.
"""

import logging
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.loading.checkpoint import Checkpoint
from jaxspec.models.fields import read_ints, read_object
from jaxspec.tokenizer import Tokenizer

SCALES = "_scale_inv"  # behind the name of the tensor; its values are multiplied all the same
DEFAULT_BLOCK = (128, 128)

_FLOATS8 = (np.dtype(ml_dtypes.float8_e4m3fn),)
_LOGGER = logging.getLogger("jaxspec")


class DequantisedCheckpoint(Checkpoint):
    """A checkpoint whose quantised tensors are read as float32."""

    def __init__(self, checkpoint: Checkpoint, block: tuple[int, int]):
        self._checkpoint, self._block = checkpoint, block
        self.path, self.eos_token_ids = checkpoint.path, checkpoint.eos_token_ids
        self.config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
        self.shapes = {name: shape for name, shape in checkpoint.shapes.items() if not _is_scale(checkpoint, name)}

    def read(self, name: str) -> np.ndarray:
        stored = self._checkpoint.read(name)
        if stored.dtype not in _FLOATS8:
            return stored
        if name + SCALES not in self._checkpoint.shapes:
            raise ValueError(f"{self.path}: tensor {name} is stored as {stored.dtype.name} and has no {name}{SCALES}.")
        scales = self._checkpoint.read(name + SCALES)
        return dequantise(stored, scales, self._block, f"{self.path}: tensor {name}")

    def load_tokenizer(self) -> Tokenizer:
        return self._checkpoint.load_tokenizer()


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with block-quantised FP8 tensors read as float32; itself where it has none.

    Raises:
        ValueError: its weights are quantised in another way.
    """
    said = _quantization(checkpoint)
    if not any(_is_scale(checkpoint, name) for name in checkpoint.shapes):
        return checkpoint
    method = said.get("quant_method")
    if method not in (None, "fp8"):
        raise _refusal(checkpoint, method)
    block = read_ints(said, "weight_block_size") or DEFAULT_BLOCK
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"{checkpoint.path} has weight_block_size={list(block)}; expected two numbers of at least 1.")
    if not said:
        _LOGGER.warning("%s has FP8 scales, and its config says nothing of them: blocks of %s", checkpoint.path, block)
    return DequantisedCheckpoint(checkpoint, (block[0], block[1]))


def dequantise(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int], what: str) -> np.ndarray:
    """Multiplies each block of a matrix by its scale; the last blocks may be cut off.

    Args:
        stored: [..., out, in], 8-bit floats.
        scales: [..., ceil(out / block), ceil(in / block)], floats, or the exponents of powers of two in uint8.
        block: rows and columns of a block.
        what: the tensor, for messages.

    Returns:
        float32 [..., out, in].

    Raises:
        ValueError: the scales do not cover the matrix.
    """
    rows, columns = stored.shape[-2:]
    grid = (*stored.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != grid:
        raise ValueError(
            f"{what} {list(stored.shape)} has scales {list(scales.shape)} instead of {list(grid)}, one for each block "
            f"of {block[0]} x {block[1]}; set weight_block_size in its config.json."
        )
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    wide = np.repeat(np.repeat(scales.astype(np.float32), block[0], -2), block[1], -1)
    return stored.astype(np.float32) * wide[..., :rows, :columns]


def refuse_quantised(checkpoint: Checkpoint) -> None:
    """Raises ValueError where the config says that weights are quantised."""
    said = _quantization(checkpoint)
    if said:
        raise _refusal(checkpoint, said.get("quant_method"))


def _refusal(checkpoint: Checkpoint, method: object) -> ValueError:
    return ValueError(
        f"{checkpoint.path} is quantised ({method}): not supported; use the unquantised weights, or those in FP8 with "
        "a scale for each block."
    )


def _quantization(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the config says of it, also where that is only a word."""
    for part in (checkpoint.config, read_object(checkpoint.config, "text_config")):
        if said := part.get("quantization_config"):
            return said if isinstance(said, Mapping) else {"quant_method": said}
    return {}


def _is_scale(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(SCALES) and name.removesuffix(SCALES) in checkpoint.shapes
