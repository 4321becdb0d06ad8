"""What attention kernels are compared with: our twin, dense attention of jax.nn, and the paged kernels of jax itself.

A peer that cannot serve a shape or this device says why. All get their keys and values as they like them best: laid out
before the clock starts, in one array or in pages that hold the block's own tokens as well, whatever that would cost.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention import Block
from jaxspec.pallas import attention_kernel, padded_head_dim
from jaxspec.pallas.specs import SCALE, Inputs
from jaxspec.tree import unpack_bits

# A run of one call: takes a number that is added to the queries, so that no two calls are the same; [B, N, H, Dv].
Run = Callable[[jax.Array], jax.Array]
# Pages that upstream kernels take in at once, as their own tests have it.
PAGES_AT_ONCE = 8


class Whole(NamedTuple):
    """Every row's tokens in one array, the block's own behind the prefix."""

    keys: jax.Array  # [B, S, K, D]; 0 behind a row's last token
    values: jax.Array
    mask: jax.Array  # bool [B, N, S]
    length: jax.Array  # int32 [B]


def ours(inputs: Inputs, backend: str) -> Run:
    """A kernel of this library, or its twin ("xla"), in its own layout of pages."""
    kernel, head_dim = attention_kernel(backend), inputs.keys.shape[3]
    lanes = [(0, 0)] * 4 + [(0, padded_head_dim(backend, head_dim) - head_dim)]
    pool = tuple(jnp.pad(pages, lanes) for pages in inputs.pool)
    scoring = inputs.scoring

    def run(nudge: jax.Array) -> jax.Array:
        queries, keys = _nudged(inputs.queries, nudge), _nudged(inputs.keys, nudge)
        how = {"kernel": kernel, "scoring": scoring}
        return inputs.block.attend(queries, keys, inputs.values, pool, inputs.layer, SCALE, **how)

    return run


def dense(inputs: Inputs, implementation: str) -> Run:
    """`jax.nn.dot_product_attention` under a mask of nodes x context."""
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN runs on GPUs alone")
    if inputs.values is None and implementation == "cudnn":
        raise NotImplementedError("cuDNN has no heads of more than 128 numbers")
    whole, width = gather(inputs), inputs.keys.shape[-1]
    how = {"mask": whole.mask[:, None], "scale": SCALE, "implementation": implementation}
    values = _wide(whole.values, width)  # it wants them as wide as keys

    def run(nudge: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(_nudged(inputs.queries, nudge), whole.keys, values, **how)
        return out[..., : inputs.value_dim or width]

    return run


def paged_tpu(inputs: Inputs) -> Run:
    """The paged kernel for TPUs that ships with jax: one query a row."""
    _need(inputs, "tpu", one_node=True)
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return _paged(inputs, functools.partial(paged_attention, pages_per_compute_block=PAGES_AT_ONCE), swap=False)


def paged_gpu(inputs: Inputs) -> Run:
    """The paged kernel for GPUs that ships with jax (Triton): one query a row."""
    _need(inputs, "gpu", one_node=True)
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return _paged(inputs, functools.partial(paged_attention, pages_per_compute_block=PAGES_AT_ONCE), swap=True)


def ragged_tpu(inputs: Inputs) -> Run:
    """The ragged paged kernel for TPUs that ships with jax: causal blocks."""
    _need(inputs, "tpu", one_node=False)
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    whole, (num_rows, num_nodes) = gather(inputs), inputs.queries.shape[:2]
    keys, values, table = _pages(whole, inputs.pool[0].shape[3])
    both = jnp.stack([keys, values], axis=2).transpose(1, 3, 0, 2, 4)  # [P, page_size, K, 2, D]
    both = both.reshape(*both.shape[:2], -1, both.shape[-1])
    ends = jnp.arange(num_rows + 1, dtype=jnp.int32) * num_nodes
    rest = (both, whole.length, table, ends, jnp.array([num_rows], jnp.int32))

    def run(nudge: jax.Array) -> jax.Array:
        queries = _wide(_nudged(inputs.queries, nudge), both.shape[-1])
        out = ragged_paged_attention(queries.reshape(-1, *queries.shape[2:]), *rest, sm_scale=SCALE)
        return out.reshape(queries.shape)[..., : inputs.queries.shape[-1]]

    return run


def gather(inputs: Inputs) -> Whole:
    """The tokens of pages and block, row by row."""
    block, pool = inputs.block, inputs.pool
    (num_rows, num_nodes), num_own = inputs.queries.shape[:2], inputs.keys.shape[1]
    size = block.table.shape[1] * pool[0].shape[3]
    place = jnp.arange(size + num_own)
    own = place - block.prefix_len[:, None]
    is_own = (own >= 0) & (own < num_own)

    def tokens(pages: jax.Array, nodes: jax.Array) -> jax.Array:
        read = pages[inputs.layer, jnp.maximum(block.table, 0)].transpose(0, 1, 3, 2, 4)
        prefix = read.reshape(num_rows, size, *nodes.shape[2:])
        prefix = jnp.pad(prefix, [(0, 0), (0, num_own), (0, 0), (0, 0)])
        behind = jnp.take_along_axis(nodes, jnp.clip(own, 0, num_own - 1)[..., None, None], axis=1)
        found = jnp.where(is_own[..., None, None], behind, prefix)
        return jnp.where((own < num_own)[..., None, None], found, 0)

    keys = tokens(pool[0], inputs.keys)
    values = keys[..., : inputs.value_dim] if inputs.values is None else tokens(pool[1], inputs.values)
    seen = jnp.take_along_axis(_sees(block, num_nodes, num_own), jnp.clip(own, 0, num_own - 1)[:, None], axis=2)
    mask = jnp.where(is_own[:, None], seen, (own < 0)[:, None])
    return Whole(keys, values, mask, block.prefix_len + num_own)


def _sees(block: Block, num_nodes: int, num_own: int) -> jax.Array:
    """Which own keys each node sees: bool [B, N, M]."""
    if block.ancestors is not None:
        return unpack_bits(block.ancestors, num_own)
    causal = jnp.tril(jnp.ones((num_nodes, num_own), bool), num_own - num_nodes)
    return jnp.broadcast_to(causal, (block.prefix_len.shape[0], num_nodes, num_own))


def _need(inputs: Inputs, platform: str, *, one_node: bool) -> None:
    if jax.default_backend() != platform:
        raise NotImplementedError(f"it runs on a {platform.upper()} alone")
    if inputs.values is None:
        raise NotImplementedError("it has no latent attention")
    if inputs.block.ancestors is not None:
        raise NotImplementedError("it has no mask for trees")
    if one_node and inputs.queries.shape[1] > 1:
        raise NotImplementedError("it takes one query a row")


def _paged(inputs: Inputs, kernel: Callable[..., jax.Array], *, swap: bool) -> Run:
    """A kernel of one query a row; `swap` is for one that takes the table before the lengths."""
    whole = gather(inputs)
    keys, values, table = _pages(whole, inputs.pool[0].shape[3])
    where = (table, whole.length) if swap else (whole.length, table)

    def run(nudge: jax.Array) -> jax.Array:
        queries = _wide(_nudged(inputs.queries, nudge)[:, 0] * SCALE, keys.shape[-1])
        return kernel(queries, keys, values, *where)[:, None, :, : inputs.queries.shape[-1]]

    return run


def _pages(whole: Whole, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values [K, pages, page_size, D] of whole vectors, and the table; rows have whole groups of pages."""
    num_rows, size, num_kv, head_dim = whole.keys.shape
    width = -(-size // (page_size * PAGES_AT_ONCE)) * PAGES_AT_ONCE

    def paged(tokens: jax.Array) -> jax.Array:
        tokens = jnp.pad(tokens, [(0, 0), (0, width * page_size - size), (0, 0), (0, -head_dim % 128)])
        return tokens.reshape(num_rows * width, page_size, num_kv, -1).transpose(2, 0, 1, 3)

    table = jnp.arange(num_rows * width, dtype=jnp.int32).reshape(num_rows, width)
    return paged(whole.keys), paged(whole.values), table


def _wide(array: jax.Array, width: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def _nudged(array: jax.Array, nudge: jax.Array) -> jax.Array:
    return array + nudge.astype(array.dtype)


PEERS: dict[str, Callable[[Inputs], Run]] = {
    "xla (twin)": functools.partial(ours, backend="xla"),
    "jax.nn": functools.partial(dense, implementation="xla"),
    "jax.nn cuDNN": functools.partial(dense, implementation="cudnn"),
    "paged, TPU": paged_tpu,
    "ragged paged, TPU": ragged_tpu,
    "paged, GPU": paged_gpu,
}
