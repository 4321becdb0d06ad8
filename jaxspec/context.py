"""What was said before each node's draw: a row's own tokens, then the drafts on the node's own path."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.state import Rows
from jaxspec.tree import DraftTree, ancestor_mask, node_depths


class Context(NamedTuple):
    """The tokens before each of a block's draws.

    Drafts that are rejected leave no trace in it: it is read off the row's history anew for every block.
    """

    history: jax.Array  # int32 [B, S], prompt and output
    num_tokens: jax.Array  # int32 [B], how many of them are known
    prompt_len: jax.Array  # int32 [B]
    # Makes int32 [B, N, D]: the drafts from the root's child down to the node itself, -1 behind them. A function, so
    # that it is computed only within the branch that reads it.
    paths: Callable[[], jax.Array]

    @classmethod
    def of(cls, rows: Rows, paths: Callable[[], jax.Array] | None = None) -> "Context":
        """The context of draws behind each row's bonus token; `paths` None is one node without drafts."""
        if paths is None:
            paths = lambda: jnp.zeros((rows.bonus.shape[0], 1, 0), jnp.int32)  # noqa: E731
        return cls(rows.history, rows.seq_len + 1, rows.sampling.prompt_len, paths)

    @classmethod
    def of_tree(cls, rows: Rows, tree: DraftTree, max_depth: int) -> "Context":
        """The context of the draws at a tree's nodes; no path is longer than `max_depth` drafts."""
        return cls.of(rows, lambda: tree_paths(tree, max_depth))

    def counts(self, vocab_size: int) -> tuple[jax.Array, jax.Array]:
        """How often each token was said: in the prompt int32 [B, 1, V], and in the output so far int32 [B, N, V]."""
        places = jnp.arange(self.history.shape[1])
        known = places < self.num_tokens[:, None]
        is_output = known & (places >= self.prompt_len[:, None])
        paths = self.paths()
        rows = jnp.arange(paths.shape[0])[:, None]

        def tally(counted: jax.Array) -> jax.Array:
            tokens = jnp.where(counted, self.history, vocab_size)
            return jnp.zeros((paths.shape[0], vocab_size), jnp.int32).at[rows, tokens].add(1, mode="drop")

        nodes = jnp.arange(paths.shape[1])[None, :, None]
        said = jnp.broadcast_to(tally(is_output)[:, None], (*paths.shape[:2], vocab_size))
        drafts = jnp.where(paths >= 0, paths, vocab_size)
        return tally(known & ~is_output)[:, None], said.at[rows[..., None], nodes, drafts].add(1, mode="drop")

    def tokens(self) -> tuple[jax.Array, jax.Array]:
        """All tokens before each draw, int32 [B, N, S] (what is behind them means nothing), and how many [B, N]."""
        paths = self.paths()
        rows, nodes = jnp.arange(paths.shape[0])[:, None, None], jnp.arange(paths.shape[1])[None, :, None]
        size = self.history.shape[1]
        is_draft = paths >= 0
        places = self.num_tokens[:, None, None] + jnp.arange(paths.shape[2])
        whole = jnp.broadcast_to(self.history[:, None], (*paths.shape[:2], size))
        whole = whole.at[rows, nodes, jnp.where(is_draft, places, size)].set(paths, mode="drop")
        return whole, self.num_tokens[:, None] + jnp.sum(is_draft, axis=-1, dtype=jnp.int32)

    def last_outputs(self, count: int) -> jax.Array:
        """The last `count` output tokens before each draw, int32 [B, N, count]; -1 where there are fewer."""
        whole, lengths = self.tokens()
        places = lengths[..., None] - count + jnp.arange(count)
        found = jnp.take_along_axis(whole, jnp.clip(places, 0, whole.shape[-1] - 1), axis=-1)
        return jnp.where(places >= self.prompt_len[:, None, None], found, -1)


def tree_paths(tree: DraftTree, max_depth: int) -> jax.Array:
    """Drafts from the root's child down to each node: int32 [B, N, max_depth], -1 behind the node itself.

    For parents [-1, 0, 0, 1] and tokens [9, 5, 6, 7]:

        [[-1, -1], [5, -1], [6, -1], [5, 7]]
    """
    depths = node_depths(tree.parents, max_depth)
    on_path = ancestor_mask(tree.parents, max_depth)
    levels = jnp.arange(1, max_depth + 1)
    # [B, N, D, N]: at most one ancestor has a given depth.
    is_level = on_path[:, :, None, :] & (depths[:, None, None, :] == levels[:, None])
    return jnp.max(jnp.where(is_level, tree.tokens[:, None, None, :], -1), axis=-1, initial=-1)
