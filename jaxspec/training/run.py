"""A whole training run, from a target and its answers to an exported draft."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.load import load_model
from jaxspec.models import MODELS
from jaxspec.models.network import Network
from jaxspec.training.card import model_card
from jaxspec.training.examples import Batch, Example, read_examples
from jaxspec.training.kept_settings import keep_settings
from jaxspec.training.student import DTYPES, DraftSettings, Target
from jaxspec.training.taught import Objective
from jaxspec.training.teacher import Lesson, Lessons, lesson
from jaxspec.training.trainer import Trainer, TrainSettings

DRAFT = "draft"
# Texts that the target reads together.
_LESSON_ROWS = 8


class Told(NamedTuple):
    """What a run tells while it goes on: a kind, and numbers."""

    kind: str
    values: dict[str, Any]


def train_draft(
    draft: DraftSettings,
    objective: Objective,
    settings: TrainSettings,
    out: Path,
    *,
    tell: Callable[[Told], None] = lambda told: None,
    measure: Callable[[Path], dict[str, Any]] | None = None,
    until: int | None = None,
    lessons: Path | None = None,
) -> Path:
    """Trains a draft; started again with the same settings, it goes on.

    Args:
        draft, objective, settings: see there.
        out: folder for checkpoints, the log, what the target makes of the texts, and the draft.
        tell: hears of progress.
        measure: gets the draft's folder after every epoch, and returns what an engine makes of it, for the log.
        until: stop after so many steps, for a run in pieces.
        lessons: folder for what the target makes of the texts, which runs on the same texts share; in `out` if None.

    Returns:
        The folder of the exported draft.

    Raises:
        FileNotFoundError, ValueError: the data or the target cannot be read, or `out` is of a run with other settings.
    """
    if lessons is not None and draft.keep_lessons != "disk":
        raise ValueError(f"lessons={lessons} and keep_lessons={draft.keep_lessons!r}; leave one of them out.")
    parts = {"draft": draft, "objective": objective, "training": settings}
    said = {name: dataclasses.asdict(part) for name, part in parts.items()}
    keep_settings(out / "train.json", said)
    target = _load_target(draft.model)
    examples = [
        e for path in draft.data for e in read_examples(Path(path), target.tokenizer, max_length=draft.max_length)
    ]
    if not examples:
        raise ValueError(f"{', '.join(draft.data)} has no answer to learn from.")
    student = draft.begin(target, examples, seed=settings.seed)
    about = {
        "examples": len(examples),
        "tokens": sum(len(example.ids) for example in examples),
        "answer_tokens": sum(int(example.is_answer.sum()) for example in examples),
        **student.about,
    }
    tell(Told("data", about))
    if draft.keep_lessons == "disk":
        kept = Lessons(
            lessons or out / "lessons",
            target.network,
            target.leaves,
            student.capture,
            examples,
            dtype=jnp.dtype(DTYPES[draft.lesson_dtype]),
            identity=_identity(draft.model, examples),
        )
        kept.make(_LESSON_ROWS, lambda count: tell(Told("lessons", {"examples": count})))
        read = kept.read
    else:

        def read(batch: Batch) -> Lesson:
            return lesson(target.network, target.leaves, jnp.asarray(batch.ids), student.capture)

    with closing(Trainer(student, examples, read, objective, settings, out)) as trainer:

        def end_epoch() -> None:
            epoch = trainer.step // trainer.steps_per_epoch
            student.write(trainer.leaves, out / DRAFT, model_card(student.kind, said, about, epoch))
            measured = {} if measure is None else measure(out / DRAFT)
            trainer.note({"epochs": epoch, "measured": measured})
            tell(Told("epoch", {"epochs": epoch, "measured": measured}))

        tell(Told("start", {"step": trainer.step, "steps": trainer.num_steps, "per_epoch": trainer.steps_per_epoch}))
        if trainer.step and trainer.step % trainer.steps_per_epoch == 0 and not trainer.is_noted("epochs"):
            end_epoch()  # which a killed run did not come to
        while trainer.step < trainer.num_steps and (until is None or trainer.step < until):
            end = (trainer.step // trainer.steps_per_epoch + 1) * trainer.steps_per_epoch
            trainer.run(lambda losses: tell(Told("step", {"losses": losses})), until=min(end, until or end))
            if trainer.step == end:
                end_epoch()
    return out / DRAFT


def _load_target(model: str) -> Target:
    with open_checkpoint(model) as checkpoint:
        loaded = load_model(checkpoint, dtype=jnp.float32, scan_layers=False)
        tokenizer = checkpoint.load_tokenizer()
        config = {name: value for name, value in checkpoint.config.items() if value is not None}
    network = Network(loaded.config, MODELS[loaded.config.architecture], loaded.graphdef, loaded.treedef)
    return Target(config, network, loaded.leaves, tokenizer)


def _identity(model: str, examples: Sequence[Example]) -> str:
    """Says which target and texts these are."""
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    for example in examples:
        digest.update(example.ids.tobytes())
    return digest.hexdigest()
