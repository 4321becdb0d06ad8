"""A whole training run, from a target and its answers to an exported head."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.load import load_model
from jaxspec.models import MODELS
from jaxspec.models.network import Network
from jaxspec.training.card import model_card
from jaxspec.training.examples import Batch, Example, read_examples
from jaxspec.training.export import export_head
from jaxspec.training.feature_draft import Objective
from jaxspec.training.kept_settings import keep_settings
from jaxspec.training.new_head import check_choice, frequent_ids, new_head, usual_layers
from jaxspec.training.teacher import Lesson, Lessons, head_rows, lesson
from jaxspec.training.trainer import Trainer, TrainSettings

HEAD = "head"
_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
# Texts that the target reads together.
_LESSON_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What is trained, and on what.

    Attributes:
        model: the target's path or name.
        data: files of records, or folders of answers.
        layers: 0-based layers of the target that the head reads; None are the usual three.
        draft_vocab: tokens that the head chooses from: the most frequent ones in the answers.
        max_length: tokens of a text after which it is cut.
        keep_lessons: "disk" runs the target once over all texts, "none" in every step.
        lesson_dtype: of the states that are kept: float32 or bfloat16.
        export_dtype: of the exported head.
    """

    model: str
    data: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    draft_vocab: int = 8192
    max_length: int = 512
    keep_lessons: str = "disk"
    lesson_dtype: str = "bfloat16"
    export_dtype: str = "bfloat16"


class Told(NamedTuple):
    """What a run tells while it goes on: a kind, and numbers."""

    kind: str
    values: dict[str, Any]


def train_head(
    head: HeadSettings,
    objective: Objective,
    settings: TrainSettings,
    out: Path,
    *,
    tell: Callable[[Told], None] = lambda told: None,
    measure: Callable[[Path], dict[str, Any]] | None = None,
    until: int | None = None,
) -> Path:
    """Trains an EAGLE-3 head; started again with the same settings, it goes on.

    Args:
        head, objective, settings: see there.
        out: folder for checkpoints, the log, what the target makes of the texts, and the head.
        tell: hears of progress.
        measure: gets the head's folder after every epoch, and returns what an engine makes of it, for the log.
        until: stop after so many steps, for a run in pieces.

    Returns:
        The folder of the exported head.

    Raises:
        FileNotFoundError, ValueError: the data or the target cannot be read, or `out` is of a run with other settings.
    """
    said = {"head": dataclasses.asdict(head), "objective": dataclasses.asdict(objective)}
    keep_settings(out / "train.json", {**said, "training": dataclasses.asdict(settings)})
    with open_checkpoint(head.model) as checkpoint:
        loaded = load_model(checkpoint, dtype=jnp.float32, scan_layers=False)
        tokenizer = checkpoint.load_tokenizer()
    kind = MODELS[loaded.config.architecture]
    target, leaves = Network(loaded.config, kind, loaded.graphdef, loaded.treedef), loaded.leaves
    examples = [e for path in head.data for e in read_examples(Path(path), tokenizer, max_length=head.max_length)]
    if not examples:
        raise ValueError(f"{', '.join(head.data)} has no answer to learn from.")
    capture = head.layers or usual_layers(loaded.config.num_layers)
    check_choice(loaded.config, capture, head.draft_vocab)
    target_ids, coverage = frequent_ids(examples, loaded.config.vocab_size, head.draft_vocab)
    about = {
        "examples": len(examples),
        "tokens": sum(len(example.ids) for example in examples),
        "answer_tokens": sum(int(example.is_answer.sum()) for example in examples),
        "draft_vocab": len(target_ids),
        "coverage": coverage,
        "layers": list(capture),
    }
    tell(Told("data", about))
    if head.keep_lessons == "disk":
        kept = Lessons(
            out / "lessons",
            target,
            leaves,
            capture,
            examples,
            dtype=jnp.dtype(_DTYPES[head.lesson_dtype]),
            identity=_identity(head.model, examples),
        )
        kept.make(_LESSON_ROWS, lambda count: tell(Told("lessons", {"examples": count})))
        read = kept.read
    else:

        def read(batch: Batch) -> Lesson:
            return lesson(target, leaves, jnp.asarray(batch.ids), capture)

    network, first = new_head(target, leaves, capture, target_ids, seed=settings.seed)
    rows = head_rows(target, leaves, target_ids)
    with closing(Trainer(network, first, rows, examples, read, objective, settings, out)) as trainer:
        tell(Told("start", {"step": trainer.step, "steps": trainer.num_steps, "per_epoch": trainer.steps_per_epoch}))
        while trainer.step < trainer.num_steps and (until is None or trainer.step < until):
            epoch = trainer.step // trainer.steps_per_epoch + 1
            end = epoch * trainer.steps_per_epoch
            trainer.run(lambda losses: tell(Told("step", {"losses": losses})), until=min(end, until or end))
            if trainer.step == end:
                dtype = _DTYPES[head.export_dtype]
                card = model_card(head, objective, settings, about, epoch)
                export_head(network, trainer.leaves, out / HEAD, dtype=dtype, card=card, overwrite=True)
                measured = {} if measure is None else measure(out / HEAD)
                trainer.note({"epochs": epoch, "measured": measured})
                tell(Told("epoch", {"epochs": epoch, "measured": measured}))
    return out / HEAD


def _identity(model: str, examples: Sequence[Example]) -> str:
    """Says which target and texts these are."""
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    for example in examples:
        digest.update(example.ids.tobytes())
    return digest.hexdigest()
