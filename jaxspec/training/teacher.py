"""What a target makes of texts, for its drafts to learn from; in memory, or kept on disk over the epochs."""

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.network import Network
from jaxspec.training.examples import Batch, Example, make_batch
from jaxspec.training.unrolled import UnrolledBlock

Leaves = tuple[jax.Array, ...]


class Lesson(NamedTuple):
    """What a target makes of texts [B, T]."""

    features: tuple[jax.Array, ...]  # [B, T, Ht] each: outputs of the captured layers
    normed: jax.Array  # [B, T, Ht]: what its vocabulary head reads
    log_mass: jax.Array  # float32 [B, T]: log of the sum of exp of its logits


@functools.partial(jax.jit, static_argnames=("network", "capture"))
def lesson(network: Network, leaves: Leaves, ids: jax.Array, capture: tuple[int | str, ...]) -> Lesson:
    """Runs a target over whole texts, int32 [B, T]; one row at a time makes its logits."""
    model = network.bind(leaves)
    places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    block = UnrolledBlock(places, places, step=0)
    out = model.extend(ids, block, (None,), capture=(*capture, "normed"))
    mass = jax.lax.map(lambda row: jax.nn.logsumexp(model.logits(row), axis=-1), out.hidden)
    return Lesson(out.captured[:-1], out.captured[-1], mass)


def head_rows(network: Network, leaves: Leaves, ids: np.ndarray) -> jax.Array:
    """Rows of a target's vocabulary head, [len(ids), Ht]: what `normed` is multiplied with to make logits."""
    state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
    if ("lm_head",) in state:
        return state[("lm_head",)].get_value()[:, ids].T
    return state[("embed_tokens",)].get_value()[ids]


class Lessons:
    """What a target makes of examples, kept on disk: made once, read in every epoch.

    A run that was killed goes on where it stopped. A folder serves every draft that reads no other layers than it
    holds; one of other examples, another target or another dtype is refused.

    Args:
        folder: made where it is missing; (captured layers + 1) * Ht values and one float32 a token.
        network: the target, and `leaves` its weights.
        capture: 0-based layers whose outputs are kept.
        examples: the texts.
        dtype: of what is kept: float32 or bfloat16.
        identity: says which target and examples these are.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        leaves: Leaves,
        capture: tuple[int | str, ...],
        examples: Sequence[Example],
        *,
        dtype: jnp.dtype,
        identity: str,
    ):
        self._network, self._leaves, self._examples = network, leaves, examples
        self._starts = np.cumsum([0, *(len(example.ids) for example in examples)])
        folder.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"identity": identity, "capture": list(capture), "dtype": np.dtype(dtype).name}
        self._progress = _Progress(folder / "lessons.json", about)
        self._kept: tuple[int | str, ...] = tuple(self._progress.about["capture"])
        self._read_places = [*map(self._kept.index, capture), len(self._kept)]
        size = (int(self._starts[-1]), (len(self._kept) + 1) * network.config.hidden_size)
        self._states = _mapped(folder / "states.bin", np.dtype(dtype), size)
        self._masses = _mapped(folder / "masses.bin", np.dtype(np.float32), size[:1])

    def make(self, num_rows: int, on_example: Callable[[int], None] = lambda count: None) -> None:
        """Runs the target over the examples that are missing, `num_rows` together; of about one length each."""
        order = np.argsort([len(example.ids) for example in self._examples], kind="stable")
        on_example(min(self._progress.done, len(order)))
        for first in range(self._progress.done, len(order), num_rows):
            rows = order[first : first + num_rows]
            batch = make_batch(self._examples, np.pad(rows, (0, num_rows - len(rows)), constant_values=-1))
            made = lesson(self._network, self._leaves, jnp.asarray(batch.ids), self._kept)
            states = np.concatenate([*map(np.asarray, made.features), np.asarray(made.normed)], axis=-1)
            for row, index in enumerate(rows):
                start, end = self._starts[index : index + 2]
                self._states[start:end] = states[row, : end - start]
                self._masses[start:end] = np.asarray(made.log_mass[row, : end - start])
            self._states.flush()
            self._masses.flush()
            self._progress.save(first + len(rows))
            on_example(len(rows))

    def read(self, batch: Batch) -> Lesson:
        """What was made of a batch; zeros in the padding."""
        states = np.zeros((*batch.ids.shape, self._states.shape[1]), self._states.dtype)
        masses = np.zeros(batch.ids.shape, np.float32)
        for row, index in enumerate(batch.indices):
            if index >= 0:
                start, end = self._starts[index : index + 2]
                states[row, : end - start] = self._states[start:end]
                masses[row, : end - start] = self._masses[start:end]
        parts = np.split(states, len(self._kept) + 1, axis=-1)
        *features, normed = (parts[place] for place in self._read_places)
        return Lesson(tuple(map(jnp.asarray, features)), jnp.asarray(normed), jnp.asarray(masses))


class _Progress:
    """What is on the disk, and of how many examples."""

    def __init__(self, file: Path, about: dict[str, Any]):
        self._file, self.about, self.done = file, about, 0
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            self.done = before.pop("done")
            if {**before, "capture": None} != {**about, "capture": None} or set(about["capture"]) - {
                *before["capture"]
            }:
                raise ValueError(f"{file.parent} was made for {before}, and this run has {about}; give another folder.")
            self.about = before

    def save(self, done: int) -> None:
        self.done = done
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({**self.about, "done": done}), encoding="utf-8")
        os.replace(new, self._file)


def _mapped(file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
    """An array in a file; zeros at first."""
    mode = "r+" if file.is_file() else "w+"
    return np.memmap(file, dtype, mode, shape=shape)
