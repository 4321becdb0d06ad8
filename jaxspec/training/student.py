"""What every training run is told and makes: its data, its target, and the draft that learns."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxspec.models.network import Network
from jaxspec.tokenizer import Tokenizer
from jaxspec.training.examples import Example
from jaxspec.training.teacher import Leaves

DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings(abc.ABC):
    """What is learned from; what learns is said by the kind of draft.

    Attributes:
        model: the target's path or name.
        data: files of records, or folders of answers.
        max_length: tokens of a text after which it is cut.
        keep_lessons: "disk" runs the target once over all texts, "none" in every step.
        lesson_dtype: of the states that are kept: float32 or bfloat16.
        export_dtype: of the exported draft.
    """

    model: str
    data: tuple[str, ...]
    max_length: int = 512
    keep_lessons: str = "disk"
    lesson_dtype: str = "bfloat16"
    export_dtype: str = "bfloat16"

    @abc.abstractmethod
    def begin(self, target: "Target", examples: Sequence[Example], *, seed: int) -> "Student":
        """Makes the draft.

        Raises:
            ValueError: the settings do not fit the target.
        """


class Target(NamedTuple):
    """The model that writes the texts."""

    config: Mapping[str, Any]  # its config.json
    network: Network
    leaves: Leaves
    tokenizer: Tokenizer | None


@dataclasses.dataclass(frozen=True)
class Student:
    """A draft before its first step.

    Attributes:
        kind: what it is, for its card.
        network: the draft, and `leaves` its weights.
        frozen: names of leaves that are not trained.
        rows: [Vd, Ht], rows of the target's vocabulary head for the draft's tokens.
        capture: layers of the target that it reads.
        about: what was chosen, for the card and the log; JSON values.
        write: writes it with some weights: (leaves, folder, card).
    """

    kind: str
    network: Network
    leaves: Leaves
    frozen: tuple[str, ...]
    rows: jax.Array
    capture: tuple[int | str, ...]
    about: dict[str, Any]
    write: Callable[[Leaves, Path, str], None]
