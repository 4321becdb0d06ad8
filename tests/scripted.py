"""Drafts by a script: right for a prescribed number of tokens, wrong after that.

The script is indexed by the number of committed tokens, so that it prescribes the same rounds under every schedule.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.draft.base import CacheShape, DraftSettings, Observation
from jaxspec.metrics import Emission
from jaxspec.models.network import Network
from jaxspec.request import Request
from jaxspec.state import DraftState, Rows
from jaxspec.tree import DraftTree
from tests.tiny import VOCAB

# Script entry of a round that proposes nothing.
NO_DRAFT = -1
# What a node holds: the true token of its depth as far as the script says, a wrong one, or the true one below a wrong
# parent, where it must never be accepted.
RIGHT, WRONG, IMPOSTOR = 0, 1, 2


def script_leaves(
    sequences: Sequence[Sequence[int]], script: Sequence[int], *, max_len: int, num_sequences: int
) -> tuple[jax.Array, ...]:
    """What a scripted method reads as its weights.

    Args:
        sequences: prompts and outputs of plain decoding; no prompt may be the beginning of another sequence.
        script: how many drafts are right in a round with `s` committed tokens: `script[s % len(script)]`, or NO_DRAFT.
        max_len: the engine's max_model_len.
        num_sequences: rows of the array, so that one program serves tests with fewer sequences.

    Returns:
        int32 [num_sequences, max_len] and int32 [max_len].
    """
    truth = np.full((num_sequences, max_len), -1, np.int32)
    for row, sequence in zip(truth, sequences):
        row[: len(sequence)] = sequence
    return jnp.asarray(truth), jnp.asarray(np.resize(np.array(script, np.int32), max_len))


def chain_layout(num_steps: int) -> list[tuple[int, int, int]]:
    """Nodes behind the root as (parent, depth, what it holds)."""
    return [(depth - 1, depth, RIGHT) for depth in range(1, num_steps + 1)]


def tree_layout(num_steps: int) -> list[tuple[int, int, int]]:
    """The nodes of `chain_layout` among decoys; the right branch is never the first child.

    Up to depth 2, with `w` wrong, `r` right and `i` an impostor, numbered in order:

        root -- w1 -- i3
             \\- r2 -- w4
                   \\- r5
    """
    nodes = [(0, 1, WRONG), (0, 1, RIGHT)]
    for depth in range(2, num_steps + 1):
        wrong, right = len(nodes) - 1, len(nodes)
        nodes += [(wrong, depth, IMPOSTOR), (right, depth, WRONG), (right, depth, RIGHT)]
    return nodes


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Finds a row's true continuation in its leaves (`script_leaves`) and drafts as the script says."""

    num_steps: int
    is_chain: bool
    capture: tuple[int, ...] = ()

    @classmethod
    def create(cls, settings: DraftSettings, network: Network | None, target_vocab: int) -> "Scripted":
        return cls(settings.shape.num_steps, settings.shape.is_chain)

    @property
    def layout(self) -> list[tuple[int, int, int]]:
        return chain_layout(self.num_steps) if self.is_chain else tree_layout(self.num_steps)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.layout) + 1

    def init(self, shape: CacheShape) -> DraftState:
        return DraftState((), ())

    def propose(self, params: tuple[jax.Array, ...], state: DraftState, rows: Rows, table: jax.Array) -> DraftTree:
        truth, script = params
        places = jnp.arange(truth.shape[1])
        differs = (truth != rows.history[:, None]) & (places <= rows.seq_len[:, None, None])
        is_mine = ~jnp.any(differs, axis=-1)
        mine = truth[jnp.argmax(is_mine, axis=1)]
        num_right = script[jnp.minimum(rows.seq_len, truth.shape[1] - 1)]

        parents, depths, held = (jnp.array(column, jnp.int32) for column in zip(*self.layout))
        following = jnp.minimum(rows.seq_len[:, None] + depths, truth.shape[1] - 1)
        fails = (held == RIGHT) & (depths > num_right[:, None])
        # Next to the true token, and two wrong siblings differ.
        shift = jnp.where(held == WRONG, 2, fails.astype(jnp.int32))
        drafts = (jnp.take_along_axis(mine, following, axis=1) + shift) % VOCAB
        known = jnp.any(is_mine, axis=1) & (num_right != NO_DRAFT)
        drafts = jnp.where(known[:, None], drafts, -1)
        tokens = jnp.concatenate([rows.bonus[:, None], drafts], axis=1)
        scores = -jnp.append(0, depths).astype(jnp.float32)  # the nearer the likelier
        parents = jnp.broadcast_to(jnp.append(-1, parents), tokens.shape).astype(jnp.int32)
        return DraftTree(tokens, parents, jnp.broadcast_to(scores, tokens.shape))

    def observe(
        self, params: tuple[jax.Array, ...], state: DraftState, rows: Rows, table: jax.Array, seen: Observation
    ) -> DraftState:
        return state


def expected_emissions(method: Scripted, script: Sequence[int], request: Request) -> list[Emission]:
    """The steps of a finished request that was never preempted, as the script prescribes them."""
    num_outputs = len(request.output_ids)
    depths = [depth for _, depth, _ in method.layout]
    emissions, emitted = [Emission(1, 0, 0, False)], 1
    while emitted < num_outputs:
        # The bonus token is emitted and not committed.
        scripted = script[(len(request.prompt_ids) + emitted - 1) % len(script)]
        # The last token of the budget is never a draft's: no draft is proposed for its place.
        useful = min(method.num_steps, request.budget - emitted - 1)
        accepted = max(0, min(scripted, useful))
        count = min(accepted + 1, num_outputs - emitted)
        ends = emitted + count == num_outputs
        judged = min(useful, count) if ends else useful
        proposed = 0 if scripted == NO_DRAFT else sum(depth <= judged for depth in depths)
        emissions.append(Emission(count, min(accepted, count), proposed, True))
        emitted += count
    return emissions
