"""How a draft tree is judged: by coupling, by rejection sampling, or by the target's law alone.

`Coupled` draws the target's token at every node with the row's own noise, so that the output is that of plain
decoding, token for token. The other rules toss coins: what they emit follows the target's law (with `TargetOnly`,
where both thresholds are 1) and is not what plain decoding draws. Their coins, and the noise of drafts that are drawn
for them, are keyed by the position that the round starts at as well: a later round drafts and judges the same position
anew, and must not see what the earlier one went by.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxspec.adjust import Processor, adjust
from jaxspec.context import Context
from jaxspec.sampling import best_token, draw, fresh_seeds, gumbel_noise, law
from jaxspec.state import Rows
from jaxspec.tree import DraftTree
from jaxspec.verify import Judgement, follow_draws

# What noise is for; drafts have a purpose of their own, see `TreeDraft`.
COINS, CORRECTION = 1, 2


class Rule(Protocol):
    """What a round asks of a rule."""

    def replace_drafts(self, tree: DraftTree, rows: Rows, num_steps: int) -> DraftTree:
        """The drafts that are judged: those that were made, unless a rule has other ones."""
        del rows, num_steps
        return tree

    def judge(
        self,
        logits: jax.Array,
        positions: jax.Array,
        tree: DraftTree,
        rows: Rows,
        context: Context,
        processors: tuple[Processor, ...],
        path_len: int,
    ) -> Judgement:
        """Follows a path from the root.

        Args:
            logits: float32 [B, N, V] of the target at every node.
            positions: int32 [B, N], absolute positions of the tokens that follow the nodes.
            tree: the drafts.
            rows: settings and where each row stands.
            context: the tokens before each draw.
            processors: the user's, see `adjust`.
            path_len: P, nodes of the longest path.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Coupled(Rule):
    """Accepts a draft when it is the very token that the target draws at its parent."""

    def judge(self, logits, positions, tree, rows, context, processors, path_len) -> Judgement:
        return follow_draws(tree, draw(logits, positions, rows.sampling, context, processors), path_len)


COUPLED = Coupled()


class Decision(NamedTuple):
    """What the coins decided, before the last token is drawn."""

    path: jax.Array  # int32 [B, P], nodes from the root on; the last accepted one repeats
    matched: jax.Array  # int32 [B], accepted drafts
    weights: jax.Array  # float32 [B, V], the law of the token behind them; it need not sum to 1


class _Tossed(Rule):
    """A rule that tosses coins; a subclass decides by them."""

    def decide(self, tree: DraftTree, probs: jax.Array, coins: jax.Array) -> Decision:
        """Decides by the target's laws float32 [B, N, V] and coins float32 [B, P - 1] from [0, 1)."""
        raise NotImplementedError

    def judge(self, logits, positions, tree, rows, context, processors, path_len) -> Judgement:
        adjusted = adjust(logits, positions, rows.sampling, context, processors)
        coins = toss(fresh_seeds(rows.sampling.seed, COINS, rows.seq_len), path_len - 1)
        path, matched, weights = self.decide(tree, law(adjusted, rows.sampling), coins)
        seeds = fresh_seeds(rows.sampling.seed, CORRECTION, rows.seq_len)
        noise = gumbel_noise(seeds, matched[:, None], weights.shape[-1])[:, 0]
        last = best_token(jnp.log(weights) + noise)
        following = jnp.take_along_axis(tree.tokens, jnp.roll(path, -1, axis=1), axis=1)
        tokens = jnp.where(jnp.arange(path_len) < matched[:, None], following, last[:, None])
        unknown = jnp.full_like(tree.tokens, -1)
        drawn = unknown.at[jnp.arange(path.shape[0])[:, None], path].set(tokens)
        return Judgement(path, tokens, matched, drawn)


@dataclasses.dataclass(frozen=True)
class Rejection(_Tossed):
    """Rejection sampling of a chain whose drafts were drawn from laws that are known (arXiv 2211.17192, 2302.01318).

    Attributes:
        is_block: judges the chain as a whole (arXiv 2403.10444): never fewer drafts on average, and the same law.
    """

    is_block: bool = False

    def decide(self, tree: DraftTree, probs: jax.Array, coins: jax.Array) -> Decision:
        drafts = tree.tokens[:, 1:]
        laws = jax.nn.one_hot(drafts, probs.shape[-1]) if tree.laws is None else tree.laws
        chances, wanted = (_at(of, drafts) for of in (laws, probs[:, :-1]))
        # A node without a draft, or one that its law cannot give, is rejected and takes nothing from the target's law.
        is_draft = (drafts >= 0) & (chances > 0)
        laws = jnp.where(is_draft[..., None], laws, 0.0)
        ratios = jnp.where(is_draft, wanted / jnp.where(is_draft, chances, 1.0), 0.0)
        none_follows = jnp.zeros_like(probs[:, :1])
        laws = jnp.concatenate([laws, none_follows], axis=1)
        if self.is_block:
            kept, residuals = _block(ratios, probs, laws)
            order = jnp.arange(1, drafts.shape[1] + 1)
            matched = jnp.max(jnp.where(coins < kept, order, 0), axis=1, initial=0)
        else:
            residuals = jnp.maximum(probs - laws, 0.0)
            matched = jnp.sum(jnp.cumprod(coins < ratios, axis=1), axis=1)
        matched = matched.astype(jnp.int32)
        path = jnp.minimum(jnp.arange(probs.shape[1], dtype=jnp.int32), matched[:, None])
        return Decision(path, matched, _weights(_row(residuals, matched), _row(probs, matched)))


def _block(ratios: jax.Array, probs: jax.Array, laws: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chances [B, S] that a block of so many drafts is kept, and the residuals [B, S + 1, V] behind each."""
    reach = [jnp.ones_like(probs[:, 0, 0])]
    for place in range(ratios.shape[1]):
        reach.append(jnp.minimum(1.0, reach[-1] * ratios[:, place]))
    reached = jnp.stack(reach, axis=1)
    residuals = jnp.maximum(reached[..., None] * probs - laws, 0.0)
    left = jnp.sum(residuals, axis=-1)[:, 1:]
    total = left + 1.0 - reached[:, 1:]
    # Where nothing is left of a block that is sure, the next draft is as sure, and so is a longer block.
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0), residuals


@dataclasses.dataclass(frozen=True)
class TargetOnly(_Tossed):
    """Accepts a child with the target's probability of it, one coin a level; any tree that knows no coin will do.

    With thresholds of 1 the output follows the target's law. Below 1 more drafts are accepted and it does not: lossy.

    Attributes:
        threshold_single: a child that the target gives this probability is accepted whatever the coin says.
        threshold_acc: the coin is compared with the summed probabilities over this.
    """

    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def decide(self, tree: DraftTree, probs: jax.Array, coins: jax.Array) -> Decision:
        node = jnp.zeros(tree.tokens.shape[0], jnp.int32)
        going = jnp.ones_like(node, dtype=bool)
        path = [node]
        for level in range(coins.shape[1]):
            is_child, chances = _children(tree, probs, node)
            passed = coins[:, level, None] < jnp.cumsum(chances, axis=1) / self.threshold_acc
            accepted = is_child & (passed | (chances >= self.threshold_single))
            going &= jnp.any(accepted, axis=1)
            node = jnp.where(going, jnp.argmax(accepted, axis=1).astype(jnp.int32), node)
            path.append(node)
        nodes = jnp.stack(path, axis=1)
        matched = jnp.sum(nodes[:, 1:] != nodes[:, :-1], axis=1, dtype=jnp.int32)
        is_child, _ = _children(tree, probs, node)
        own = _row(probs, node)
        rows, rejected = jnp.arange(own.shape[0])[:, None], jnp.where(is_child, tree.tokens, own.shape[-1])
        return Decision(nodes, matched, _weights(own.at[rows, rejected].set(0.0, mode="drop"), own))


def _children(tree: DraftTree, probs: jax.Array, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which nodes are drafts below `node` [B], and the target's probability of each there, 0 for others: [B, N]."""
    is_child = (tree.parents == node[:, None]) & (tree.tokens >= 0)
    chances = jnp.take_along_axis(_row(probs, node), jnp.maximum(tree.tokens, 0), axis=1)
    return is_child, jnp.where(is_child, chances, 0.0)


def toss(seeds: jax.Array, count: int) -> jax.Array:
    """Coins from [0, 1): float32 [B, count] from seeds uint32 [B, 2]."""
    return jax.vmap(lambda seed: jax.random.uniform(jax.random.wrap_key_data(seed, impl="threefry2x32"), (count,)))(
        seeds
    )


def _at(laws: jax.Array, tokens: jax.Array) -> jax.Array:
    """Probabilities [B, S] of tokens [B, S] by laws [B, S, V]; of -1, anything."""
    return jnp.take_along_axis(laws, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]


def _row(leaves: jax.Array, index: jax.Array) -> jax.Array:
    """leaves[b, index[b]]: [B, V] from [B, N, V]."""
    return jnp.take_along_axis(leaves, index[:, None, None], axis=1)[:, 0]


def _weights(residual: jax.Array, probs: jax.Array) -> jax.Array:
    """The residual, or the law itself where rounding leaves nothing of it."""
    return jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, probs)
