"""Named shapes of attention, shared by the kernels' tests and benchmarks: models x batch x nodes x lengths.

Heads are those of the real models, on one chip; DeepSeek-V3's are its latent attention with absorbed queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.attention import PLAIN_SCORING, AttentionInputs, Block, Partial, Scoring, fold
from jaxspec.pallas import attention_kernel, padded_head_dim, prefix_kernel
from jaxspec.tree import ancestor_mask, pack_bits

# A factor on the scores that leaves them neither flat nor sharp.
SCALE = 0.3
# How far a kernel may be from its twin, by dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-3}


class Heads(NamedTuple):
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # of latent attention, see `Scoring`


class Spec(NamedTuple):
    """One shape of a call."""

    heads: Heads
    lengths: tuple[int, ...]  # committed tokens of each row
    num_nodes: int
    topk: int = 0  # children of a node of the tree; 1 is a chain under ancestor bits, 0 a causal block
    page_size: int = 64
    num_earlier: int = 0  # uncommitted nodes before the block, seen at random

    def parents(self, rng: np.random.Generator) -> np.ndarray:
        """Random trees in which no node has more than `topk` children: int32 [B, N]."""
        trees = np.full((len(self.lengths), self.num_nodes), -1, np.int32)
        for tree in trees:
            free = [0] * self.topk
            for node in range(1, self.num_nodes):
                tree[node] = free.pop(rng.integers(len(free)))
                free += [node] * self.topk
        return trees

    def inputs(self, dtype: str, seed: int = 0) -> "Inputs":
        """Random inputs, small enough that a bfloat16 result has its last bit below 2e-3.

        Pages are in random order, and whatever in them is no committed token is NaN.
        """
        rng = np.random.default_rng(seed)
        num_rows, (num_heads, num_kv, dim, value_dim) = len(self.lengths), self.heads
        width = -(-max(*self.lengths, 1) // self.page_size) + 1
        order = rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
        table = np.full_like(order, -1)
        pools = np.full((2, 2, num_rows * width, num_kv, self.page_size, dim), np.nan, np.float32)
        for row, length in enumerate(self.lengths):
            used = -(-length // self.page_size)
            table[row, :used] = order[row, :used]
            for position in range(0, length, self.page_size):
                held = min(self.page_size, length - position)
                page = table[row, position // self.page_size]
                pools[:, 1, page, :, :held] = rng.uniform(-0.5, 0.5, (2, num_kv, held, dim))
        lengths = np.array(self.lengths, np.int32)
        nodes = (num_rows, self.num_nodes + self.num_earlier, num_kv, dim)
        queries = 4 * rng.standard_normal((num_rows, self.num_nodes, num_heads, dim), np.float32)
        keys, values = rng.uniform(-0.5, 0.5, (2, *nodes))
        block = self._block(rng, jnp.asarray(lengths), jnp.asarray(table))
        pool = jnp.asarray(pools[0], dtype), jnp.asarray(pools[1], dtype)
        queries, keys, values = (jnp.asarray(array, dtype) for array in (queries, keys, values))
        if value_dim is not None:
            return Inputs(queries, keys, None, pool[:1], jnp.int32(1), block, value_dim)
        return Inputs(queries, keys, values, pool, jnp.int32(1), block)

    def _block(self, rng: np.random.Generator, lengths: jax.Array, table: jax.Array) -> Block:
        if not self.topk:
            return Block(lengths[:, None] + jnp.arange(self.num_nodes, dtype=jnp.int32), lengths, table)
        own = ancestor_mask(jnp.asarray(self.parents(rng)), self.num_nodes - 1)
        earlier = jnp.asarray(rng.random((*own.shape[:2], self.num_earlier)) < 0.5)
        visible = jnp.concatenate([earlier, own], axis=2)
        depth = jnp.sum(visible, axis=2, dtype=jnp.int32) - 1
        return Block(lengths[:, None] + depth, lengths, table, pack_bits(visible))


class Inputs(NamedTuple):
    """Arguments of `Block.attend`, but for the scale."""

    queries: jax.Array  # [B, N, H, D]
    keys: jax.Array  # [B, M, K, D]
    values: jax.Array | None
    pool: tuple[jax.Array, ...]  # [2, pages, K, page_size, D] each; layer 0 is NaN
    layer: jax.Array
    block: Block
    value_dim: int | None = None

    @property
    def scoring(self) -> Scoring:
        """What is static about its softmax, without a window and a cap."""
        return Scoring(value_dim=self.value_dim)

    def attend(self, backend: str, scoring: Scoring = PLAIN_SCORING, sinks: jax.Array | None = None) -> jax.Array:
        """What a backend makes of it: [B, N, H, D]; compiled, and the pools in the backend's layout."""
        how = {"kernel": attention_kernel(backend), "scoring": scoring._replace(value_dim=self.value_dim)}

        @jax.jit
        def run(queries, keys, values, pool, layer, block, sinks):
            return block.attend(queries, keys, values, pool, layer, SCALE, sinks=sinks, **how)

        return run(*self._laid_out(backend), sinks)

    def prefix(self, backend: str, scoring: Scoring = PLAIN_SCORING) -> Partial:
        """The same of `prefix_attention`."""
        kernel, scoring = prefix_kernel(backend), scoring._replace(value_dim=self.value_dim)

        @jax.jit
        def run(queries, *rest):
            return kernel(AttentionInputs(fold(queries * SCALE, rest[0].shape[2]), *rest), scoring)

        return run(*self._laid_out(backend))

    def _laid_out(self, backend: str) -> tuple:
        head_dim = self.keys.shape[3]
        lanes = [(0, 0)] * 4 + [(0, padded_head_dim(backend, head_dim) - head_dim)]
        return self._replace(pool=tuple(jnp.pad(pool, lanes) for pool in self.pool))[:6]


MODELS = {
    "SmolLM2-135M": Heads(9, 3, 64),
    "Llama-3.1-8B": Heads(32, 8, 128),
    "Qwen3-32B": Heads(64, 8, 128),
    "Qwen3-30B-A3B": Heads(32, 4, 128),
    "DeepSeek-V3": Heads(128, 1, 512 + 64, value_dim=512),
}
# Nodes and children: plain decoding, a chain, trees of two sizes.
FORMS = {"plain": (1, 0), "chain": (4, 0), "tree-8": (8, 4), "tree-64": (64, 10)}
LENGTHS = {"short": (128, 131, 65, 200), "ragged": (0, 1, 1000, 64, 4096, 63, 2049, 300), "long": (16384,)}

SPECS = {
    f"{model} {form} {lengths}": Spec(heads, LENGTHS[lengths], *FORMS[form])
    for model, heads in MODELS.items()
    for form in FORMS
    for lengths in LENGTHS
}
SPECS |= {f"{model} prefill": Spec(heads, (0, 512), 512) for model, heads in MODELS.items()}
