"""Simulated acceptance, for benchmarks: rounds of a chosen mean length, whatever the drafts are worth.

The device does the work of real rounds, and the output is not the model's. What is drafted is made a chain that is as
long as a path may be, and the target's draws are replaced so that the walk follows it as far as wanted.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.rules import Rule
from jaxspec.sampling import draw
from jaxspec.state import Rows
from jaxspec.tree import DraftTree
from jaxspec.verify import Judgement, follow_draws

# Accept lengths are multiples of 1 / PARTS, so that they are counted without a rounding error.
PARTS = 1000
# No target draws it.
NEVER_DRAWN = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True)
class Simulated(Rule):
    """Accepts drafts unseen.

    Attributes:
        accept_len: mean tokens of a round.
    """

    accept_len: float

    def replace_drafts(self, tree: DraftTree, rows: Rows, num_steps: int) -> DraftTree:
        return simulated_tree(tree, rows, num_steps)

    def judge(self, logits, positions, tree, rows, context, processors, path_len) -> Judgement:
        drawn = draw(logits, positions, rows.sampling, context, processors)
        return follow_draws(*simulated_draws(tree, drawn, rows, self.accept_len), path_len)


def simulated_tree(tree: DraftTree, rows: Rows, num_steps: int) -> DraftTree:
    """The tree with a chain of `num_steps` drafts in front, every node of it filled, and none that stops the row."""
    num_rows, num_nodes = tree.tokens.shape
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    parents = jnp.broadcast_to(jnp.where(nodes <= num_steps, nodes - 1, 0), (num_rows, num_nodes))
    stops = jnp.any(tree.tokens[..., None] == rows.sampling.stop_ids[:, None, :], axis=-1)
    tokens = jnp.where((tree.tokens < 0) | stops, rows.bonus[:, None], tree.tokens)
    return DraftTree(tokens, parents)


def round_lengths(positions: jax.Array, accept_len: float) -> jax.Array:
    """Tokens that a round emits whose first node is at absolute positions [B]: int32 [B], of mean `accept_len`.

    Rounds end at the whole parts of the multiples of accept_len, so that R of them emit R * accept_len tokens, give or
    take accept_len + 1.
    """
    step = round(accept_len * PARTS)
    within = positions % step  # after so many tokens the ends repeat
    index = -(-(within + 1) * PARTS // step)  # of the first multiple that ends behind the position
    return index * step // PARTS - within


def simulated_draws(tree: DraftTree, drawn: jax.Array, rows: Rows, accept_len: float) -> tuple[DraftTree, jax.Array]:
    """A tree and draws [B, N] over which the walk takes as many drafts of the chain as it is to.

    Args:
        tree: of `simulated_tree`; nodes beyond the budget may be empty.
        drawn: the target's draws.
        rows: where each row is.
        accept_len: mean tokens of a round.
    """
    nodes = jnp.arange(tree.tokens.shape[1])
    last = (round_lengths(rows.seq_len, accept_len) - 1)[:, None]  # the last node of the walk
    following = jnp.roll(tree.tokens, -1, axis=1)
    drawn = jnp.where((nodes < last) & (following >= 0), following, drawn)
    passed_by = (nodes > last) & (tree.tokens >= 0)
    return tree._replace(tokens=jnp.where(passed_by, NEVER_DRAWN, tree.tokens)), drawn
