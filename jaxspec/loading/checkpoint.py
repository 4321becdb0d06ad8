"""One interface to a model on disk: a Hugging Face folder or a GGUF file, under Hugging Face's names."""

import abc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxspec.checks import check_path, is_token_id
from jaxspec.loading import gguf_model
from jaxspec.loading.embedded import EMBEDDED_NAMES, find_embedded_model
from jaxspec.loading.gguf_file import GGUFFile
from jaxspec.loading.gguf_tokenizer import build_tokenizer, chat_template, special_tokens
from jaxspec.loading.safetensors_file import SafetensorsFile
from jaxspec.loading.torch_file import TorchFile
from jaxspec.models.config import ModelConfig
from jaxspec.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_TORCH_FILE = "pytorch_model.bin"


class Checkpoint(abc.ABC):
    """A model's files.

    Attributes:
        path: the folder or the file.
        config: what config.json says (for GGUF: would say).
        shapes: tensor name -> shape, as Hugging Face names and orients them.
        eos_token_ids: ids that end a text, from all the files that name some.
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    eos_token_ids: tuple[int, ...]

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """One tensor, for reading only; KeyError if there is none of that name.

        From safetensors in its stored dtype and memory-mapped, from GGUF dequantised to float32.
        """

    @abc.abstractmethod
    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the model; FileNotFoundError or ValueError if there is none to be read."""

    def close(self) -> None:  # noqa: B027
        """Nothing is held between reads: each array keeps its own mapping."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a model.

    Args:
        path: a Hugging Face folder, a GGUF file, a folder that holds one GGUF file, or the name of the embedded model:
            "smollm2" or "SmolLM2-135M-Instruct". What exists on disk goes before the name.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: no such path, or no model in it.
        ValueError: `path` is empty, a file that is damaged or not what its name says, or an unsupported GGUF model.
    """
    name = check_path("model", path, hint=f"give a folder, a .gguf file or {EMBEDDED_NAMES[0]!r}")
    place = Path(os.path.expanduser(name))
    if not _exists(place):
        if name.lower() in EMBEDDED_NAMES:
            return GGUFCheckpoint(find_embedded_model())
        raise FileNotFoundError(
            f"model {name!r} is not a file or folder, nor the embedded model ({', '.join(EMBEDDED_NAMES)}); "
            "nothing is downloaded: give the path of a Hugging Face folder or of a .gguf file."
        )
    if place.is_file():
        if place.suffix != ".gguf":
            raise ValueError(f"model file {place} does not end in .gguf; give that file, or the folder of config.json.")
        return GGUFCheckpoint(place)
    weights = sorted(place.glob("*.safetensors"))
    files = sorted(place.glob("*.gguf"))
    if files and not weights and not (place / _INDEX).exists():
        if len(files) > 1:
            raise ValueError(f"{place} holds {len(files)} GGUF files ({', '.join(f.name for f in files)}); name one.")
        return GGUFCheckpoint(files[0])
    return FolderCheckpoint(place)


class FolderCheckpoint(Checkpoint):
    """A Hugging Face folder: config.json, weights (safetensors, else pytorch_model.bin), and usually a tokenizer."""

    def __init__(self, folder: Path):
        self.path = folder
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json; it is not a Hugging Face model folder.")
        self.config = _read_json(folder / "config.json")
        self.eos_token_ids = _stop_ids(folder, self.config)
        self._home: dict[str, SafetensorsFile | TorchFile] = {}
        for file in _weight_files(folder):
            for name in file.tensors:
                if name in self._home:
                    raise ValueError(
                        f"{folder}: tensor {name} is in {self._home[name].path.name} and {file.path.name}."
                    )
                self._home[name] = file
        self.shapes = {name: file.tensors[name].shape for name, file in self._home.items()}

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file, which carries its config and tokenizer."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GGUFFile(path)
        with _naming(path, "settings"):
            self.config = gguf_model.hf_config(self._file)
            self.eos_token_ids = gguf_model.stop_ids(self._file.metadata)
            ModelConfig.from_hf(self.config)  # whoever builds the model asks again, and does not know the file
        self._names = {
            gguf_model.hf_name(name): name for name in self._file.tensors if name != gguf_model.ROPE_DIVISORS
        }
        self.shapes = {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        return gguf_model.read_hf_order(self._file, self._names[name], self.config)

    def token_id(self, role: str) -> int | None:
        """The token that plays a role in GGUF's words, such as "bos"; None if the file names none."""
        return self._file.metadata.get(f"tokenizer.ggml.{role}_token_id")

    def stored_type(self, name: str) -> GGMLQuantizationType:
        """How the file stores a tensor."""
        return self._file.tensors[self._names[name]].type

    def read_stored(self, name: str) -> np.ndarray:
        """As `read`, but in the stored dtype where numpy has it: float32, float16 or bfloat16."""
        return gguf_model.read_hf_order(self._file, self._names[name], self.config, stored=True)

    def load_tokenizer(self) -> Tokenizer:
        metadata = self._file.metadata
        with _naming(self.path, "tokenizer"):
            return Tokenizer.from_backend(
                build_tokenizer(metadata, str(self.path)),
                special_tokens=special_tokens(metadata),
                chat_template=chat_template(metadata),
                eos_token_ids=self.eos_token_ids,
            )


@contextmanager
def _naming(path: Path, part: str) -> Iterator[None]:
    """Makes one ValueError that names the file of whatever a damaged one leads to, in our code or in a library's."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        if not isinstance(error, ValueError):
            said = f"its {part} cannot be read ({type(error).__name__}: {said})."
        if str(path) in said:
            raise
        raise ValueError(f"{path}: {said}") from error


def _weight_files(folder: Path) -> Sequence[SafetensorsFile | TorchFile]:
    """The safetensors files of a folder: those that its index names, else model.safetensors, else all there are.

    Only where there are none, pytorch_model.bin: many draft heads come as that alone.
    """
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths and (folder / _TORCH_FILE).is_file():
        return [TorchFile(folder / _TORCH_FILE)]
    if not paths:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        hint = f"; {', '.join(others[:3])} must be converted to safetensors first" if others else ""
        raise FileNotFoundError(f"{folder} has no weights (*.safetensors, pytorch_model.bin or one *.gguf){hint}.")
    return [SafetensorsFile(path) for path in paths]


def _indexed_files(index: Path) -> list[SafetensorsFile]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise ValueError(f"{index} has no weight_map.")
    shards = {str(shard): index.parent / str(shard) for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, path in shards.items() if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names {len(missing)} files that are missing: {', '.join(missing[:20])}.")
    files = {shard: SafetensorsFile(path) for shard, path in shards.items()}
    lost = [name for name, shard in weight_map.items() if name not in files[shard].tensors]
    if lost:
        raise ValueError(f"{index} places {len(lost)} tensors in files that lack them: {', '.join(lost[:20])}.")
    return list(files.values())


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; False for a name that the system takes for no path."""
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    return content


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every eos_token_id of generation_config.json and of config.json, each once: a number, a list or null."""
    generation = folder / "generation_config.json"
    said: list[tuple[Path, Any]] = [(generation, _read_json(generation))] if generation.is_file() else []
    said += [(folder / "config.json", config), (folder / "config.json", config.get("text_config"))]
    found: dict[int, None] = {}
    for file, part in said:
        stops = part.get("eos_token_id") if isinstance(part, Mapping) else None
        for stop in stops if isinstance(stops, list) else [stops]:
            if stop is None:
                continue
            if not is_token_id(stop):
                raise ValueError(f"{file} has eos_token_id={stops!r}; expected a token id, a list of them, or null.")
            found[stop] = None
    return tuple(found)
