"""The training loop: optax updates, exact resume from orbax checkpoints, a log of JSON lines."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from jaxspec.models.network import Network
from jaxspec.training.curves import simulated_accept_length
from jaxspec.training.examples import BUCKET, Batch, Example, epoch_batches, make_batch
from jaxspec.training.places import Places
from jaxspec.training.student import Student
from jaxspec.training.taught import Losses, Objective, Taught
from jaxspec.training.teacher import Leaves, Lesson

LOG = "log.jsonl"
_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How to train.

    Attributes:
        epochs: passes over the examples.
        rows: texts a step.
        accumulate: steps whose gradients make one update.
        learning_rate: at its highest; it rises linearly over `warmup` of all updates and falls to 0 as a cosine.
        clip: largest norm of a gradient.
        dtype: of activations and products; weights and the optimiser's state are float32.
        seed: of the order of the examples.
        save_seconds: time between checkpoints.
        log_steps: steps between lines of the log.
    """

    epochs: int = 5
    rows: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 0.5
    dtype: str = "float32"
    seed: int = 0
    save_seconds: float = 120.0
    log_steps: int = 10


class Position(NamedTuple):
    """A step, and what it trains on."""

    step: int
    epoch: int
    batch: Batch


class Trainer:
    """Trains a draft. Two runs of the same settings give the same numbers, however often they were killed.

    Args:
        student: the draft, and its weights at the start.
        examples: texts.
        read_lesson: what the target makes of a batch.
        folder: for checkpoints and the log.
    """

    def __init__(
        self,
        student: Student,
        examples: Sequence[Example],
        read_lesson: Callable[[Batch], Lesson],
        objective: Objective,
        settings: TrainSettings,
        folder: Path,
    ):
        self._network, self._examples, self._read_lesson = student.network, examples, read_lesson
        self._objective, self._settings = objective, settings
        leaves, trained = student.leaves, _trained(student)
        self._places = Places(settings.rows)
        self._is_trained = trained
        self._frozen = self._places.copies(
            tuple(leaf for leaf, is_one in zip(leaves, trained, strict=True) if not is_one)
        )
        self._rows_of_target = self._places.copies(student.rows)
        self._lengths = [len(example.ids) for example in examples]
        self.steps_per_epoch = len(epoch_batches(self._lengths, settings.rows, seed=0, epoch=0))
        self.num_steps = self.steps_per_epoch * settings.epochs
        self._optimizer = make_optimizer(settings, self.num_steps)
        params = tuple(leaf.astype(jnp.float32) for leaf, is_trained in zip(leaves, trained) if is_trained)
        # A copy: the state is donated, and the leaves may be the target's own.
        params = jax.tree.map(jnp.copy, params)
        self._state: dict[str, Any] = self._places.copies({"params": params, "optimizer": self._optimizer.init(params)})
        self.step = 0
        self._log = folder / LOG
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
        self._manager = ocp.CheckpointManager((folder / _CHECKPOINTS).absolute(), options=options)
        self._restore()

    @property
    def leaves(self) -> Leaves:
        """The draft's weights as they are now, float32."""
        params, frozen = iter(self._state["params"]), iter(self._frozen)
        return tuple(next(params) if is_trained else next(frozen) for is_trained in self._is_trained)

    def run(self, on_step: Callable[[Losses], None] = lambda losses: None, *, until: int | None = None) -> None:
        """Trains to the end, or until a number of steps; a checkpoint is kept when it returns."""
        saved = time.monotonic()
        for position in self._positions(self.num_steps if until is None else until):
            losses = self._train(position)
            self.step = position.step + 1
            if self.step % self._settings.log_steps == 0:
                self._write(position, losses)
            on_step(losses)
            if time.monotonic() - saved > self._settings.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()
        self._manager.wait_until_finished()

    def save(self) -> None:
        """Starts to write a checkpoint; training may go on meanwhile."""
        if self.step not in self._manager.all_steps():
            self._manager.save(self.step, args=ocp.args.StandardSave(self._state))

    def close(self) -> None:
        self._manager.close()

    def note(self, values: dict[str, Any]) -> None:
        """Adds a line to the log."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")

    def is_noted(self, name: str) -> bool:
        """Whether the log has a line with a value of this name at the current step."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.is_file() else []
        return any(said["step"] == self.step and name in said for said in map(json.loads, lines))

    def _positions(self, until: int) -> Iterator[Position]:
        for epoch in range(self.step // self.steps_per_epoch, self._settings.epochs):
            batches = epoch_batches(self._lengths, self._settings.rows, seed=self._settings.seed, epoch=epoch)
            for place, indices in enumerate(batches):
                step = epoch * self.steps_per_epoch + place
                if step >= until:
                    return
                if step >= self.step:
                    yield Position(step, epoch, make_batch(self._examples, indices))

    def _train(self, position: Position) -> Losses:
        batch = position.batch
        anchors = int(batch.is_answer[:, 1:].sum(axis=1).max(initial=1))
        self._state, losses = _update(
            self._network,
            self._optimizer,
            self._objective,
            self._is_trained,
            -(-anchors // BUCKET) * BUCKET,
            self._settings.dtype,
            self._state,
            self._frozen,
            self._rows_of_target,
            self._places.rows((batch.ids, batch.is_answer, self._read_lesson(batch))),
        )
        return losses

    def _write(self, position: Position, losses: Losses) -> None:
        count = np.maximum(np.asarray(losses.count), 1)
        agreed = (np.asarray(losses.agreed) / count).tolist()
        line = {
            "epoch": position.epoch,
            "loss": float(losses.total),
            "accept_length": simulated_accept_length(agreed),
            "loss_by_step": (np.asarray(losses.loss) / count).tolist(),
            "agreed_by_step": agreed,
        }
        self.note(line)

    def _restore(self) -> None:
        """Goes back to the newest checkpoint, and takes back what the log says of later steps."""
        latest = self._manager.latest_step()
        if latest is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._state)
            restored = self._manager.restore(latest, args=ocp.args.StandardRestore(abstract))
            self._state = self._places.copies(dict(restored))
            self.step = latest
        if self._log.is_file():
            lines = self._log.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
            self._log.write_text("".join(kept), encoding="utf-8")


def make_optimizer(settings: TrainSettings, num_steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, a linear rise and a cosine to 0."""
    updates = max(1, num_steps // settings.accumulate)
    rise = round(settings.warmup * updates)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, rise, max(updates, rise + 1))
    steps = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay),
    )
    if settings.accumulate == 1:
        return steps
    return optax.MultiSteps(steps, settings.accumulate).gradient_transformation()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5), donate_argnums=6)
def _update(
    network: Network,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    is_trained: tuple[bool, ...],
    num_anchors: int,
    dtype: str,
    state: dict[str, Any],
    frozen: Leaves,
    rows_of_target: jax.Array,
    texts: tuple[jax.Array, jax.Array, Lesson],
) -> tuple[dict[str, Any], Losses]:
    ids, is_answer, lesson = texts
    cast = lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    logits = jnp.einsum("bth,vh->btv", cast(lesson.normed), cast(rows_of_target), preferred_element_type=jnp.float32)
    taught = Taught(ids, is_answer, jax.tree.map(cast, lesson.features), logits, lesson.log_mass)

    def loss(params: Leaves) -> tuple[jax.Array, Losses]:
        trained, fixed = iter(params), iter(frozen)
        leaves = tuple(cast(next(trained) if is_one else next(fixed)) for is_one in is_trained)
        losses = objective.losses(network.bind(leaves), taught, num_anchors)
        return losses.total, losses

    gradients, losses = jax.grad(loss, has_aux=True)(state["params"])
    updates, optimizer_state = optimizer.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}, losses


def _trained(student: Student) -> tuple[bool, ...]:
    state = jax.tree.unflatten(student.network.treedef, student.leaves)
    return tuple(path[0] not in student.frozen for path, _ in nnx.to_flat_state(state))
