"""Converts a GGUF file into a Hugging Face folder."""

import collections
import functools
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.loading.checkpoint import GGUFCheckpoint, open_checkpoint
from jaxspec.loading.convert.output import Summary, check_output, staged_folder, write_json
from jaxspec.loading.convert.tensors import Tensor, write_safetensors
from jaxspec.loading.gguf_file import PLAIN_TYPES
from jaxspec.models import MODELS, ModelConfig
from jaxspec.tokenizer import Tokenizer

DEQUANTISED_DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Special tokens by id, as a config says them, and where a GGUF file has them.
_ROLES = {"bos_token_id": "bos", "pad_token_id": "padding"}


def gguf_to_hf(
    source: str | os.PathLike[str],
    out: Path,
    *,
    dtype: str = "float32",
    skip_tokenizer: bool = False,
    overwrite: bool = False,
) -> Summary:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer of a GGUF file.

    F32, F16 and BF16 tensors keep their bits. Quantised ones are dequantised, one at a time.

    Args:
        source: the file, a folder with one, or the name of the embedded model.
        out: the folder to make.
        dtype: of what was quantised, one of `DEQUANTISED_DTYPES`.
        skip_tokenizer: leave the tokenizer out.
        overwrite: replace a checkpoint at `out`.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: a file is missing, in the way, damaged, no GGUF file or of an
            unsupported model, or its tokenizer cannot be read.
    """
    if dtype not in DEQUANTISED_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known; set one of {', '.join(DEQUANTISED_DTYPES)}.")
    checkpoint = open_checkpoint(source)
    if not isinstance(checkpoint, GGUFCheckpoint):
        raise ValueError(f"{checkpoint.path} is a Hugging Face folder already; give a .gguf file.")
    check_output(out, source=checkpoint.path, overwrite=overwrite)
    config = ModelConfig.from_hf(checkpoint.config)
    _check_names(checkpoint, config)
    tokenizer = None if skip_tokenizer else _tokenizer(checkpoint)
    changes: list[str] = []
    tensors = _tensors(checkpoint, DEQUANTISED_DTYPES[dtype], changes)
    with staged_folder(out, source=checkpoint.path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors)
        if tokenizer is None:
            changes.append("no tokenizer")
        else:
            tokenizer.save(folder, max_len=config.max_position)
        if generation := _special_ids(checkpoint):
            write_json(folder / "generation_config.json", generation)
        said = {name: value for name, value in checkpoint.config.items() if value is not None}
        write_json(folder / "config.json", said | generation | {"torch_dtype": _main_dtype(tensors)})
    return Summary.of(out, tensors, changes)


def _check_names(checkpoint: GGUFCheckpoint, config: ModelConfig) -> None:
    """Raises ValueError where the file does not hold the tensors of its model, and no others."""
    expected = set(MODELS[config.architecture].tensor_map(config, False))
    missing, strange = sorted(expected - set(checkpoint.shapes)), sorted(set(checkpoint.shapes) - expected)
    if missing or strange:
        parts = [f"lacks {', '.join(missing[:5])}"] * bool(missing) + [f"has {', '.join(strange[:5])}"] * bool(strange)
        raise ValueError(f"{checkpoint.path} {' and '.join(parts)}: not a whole {config.architecture}.")


def _tokenizer(checkpoint: GGUFCheckpoint) -> Tokenizer:
    try:
        return checkpoint.load_tokenizer()
    except ValueError as error:
        text = str(error).rstrip(".")
        raise ValueError(f"{text}; --skip-tokenizer converts the weights alone.") from error


def _tensors(checkpoint: GGUFCheckpoint, dtype: np.dtype, changes: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    dequantised: collections.Counter[str] = collections.Counter()
    for name, shape in checkpoint.shapes.items():
        kind = checkpoint.stored_type(name)
        if kind not in PLAIN_TYPES:
            dequantised[kind.name] += 1
        to = PLAIN_TYPES.get(kind, dtype)
        read = functools.partial(_read, checkpoint, name, to)
        tensors[name] = Tensor(to, tuple(shape), read)
    for kind, count in dequantised.items():
        changes.append(f"{count} {kind} dequantised to {dtype.name}")
    kept = len(tensors) - dequantised.total()
    changes.append(f"{kept} kept bit for bit")
    if checkpoint.config["model_type"] == "llama":
        changes.append("rows of q and k in Hugging Face's order")
    return tensors


def _read(checkpoint: GGUFCheckpoint, name: str, dtype: np.dtype) -> np.ndarray:
    return checkpoint.read_stored(name).astype(dtype, copy=False)


def _special_ids(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """What generation_config.json says; the file may have none of it."""
    found: dict[str, Any] = {role: checkpoint.token_id(key) for role, key in _ROLES.items()}
    found["eos_token_id"] = list(checkpoint.eos_token_ids) or None
    return {role: value for role, value in found.items() if value is not None}


def _main_dtype(tensors: dict[str, Tensor]) -> str:
    """The dtype that most values have: what a config means by its one."""
    counts: collections.Counter[str] = collections.Counter()
    for tensor in tensors.values():
        counts[tensor.dtype.name] += int(np.prod(tensor.shape))
    return counts.most_common(1)[0][0]
