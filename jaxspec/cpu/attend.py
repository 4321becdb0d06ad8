"""Attention over pages and a block by the CPU's kernel."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.attention import PLAIN_SCORING, AttentionInputs, Scoring, two_part_attention
from jaxspec.cpu.attention import attention_source
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.register import host_unit, register
from jaxspec.tree import pack_bits


def attend_to_block(inputs: AttentionInputs, scoring: Scoring) -> jax.Array:
    """An `AttentionKernel`, in float32: a draft sees bit for bit what a decoded token sees.

    Windows, soft caps and sinks are left to XLA.
    """
    queries, keys, values, pool, layer, block, sinks = inputs
    num_rows, num_kv, num_queries, width = queries.shape
    if scoring != PLAIN_SCORING or sinks is not None:
        return two_part_attention(inputs, scoring)
    assert values is not None, "values are a part of the keys only where the scoring says so"
    key_pool, value_pool = pool
    num_nodes, num_keys = block.positions.shape[1], keys.shape[1]
    visible = block.ancestors
    if visible is None:
        causal = jnp.tril(jnp.ones((num_nodes, num_keys), bool), num_keys - num_nodes)
        visible = jnp.broadcast_to(pack_bits(causal), (num_rows, num_nodes, -(-num_keys // 32)))
    unfolded = queries.reshape(num_rows, num_kv, num_nodes, -1, width).transpose(0, 2, 1, 3, 4)
    out = attend(
        unfolded.reshape(num_rows, num_nodes, -1, width),
        *(keys, values, (key_pool, value_pool), layer),
        table=block.table,
        prefix_len=block.prefix_len,
        visible=visible,
    )
    out = out.reshape(num_rows, num_nodes, num_kv, -1, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_rows, num_kv, num_queries, width)


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pool: tuple[jax.Array, jax.Array],
    layer: int | jax.Array,
    *,
    table: jax.Array,
    prefix_len: jax.Array,
    visible: jax.Array,
) -> jax.Array:
    """Softmax attention; a query's result depends on what it sees and on nothing else, bit for bit.

    Args:
        queries: float32 [B, N, H, D], scaled; H = K x G, query heads of one kv head are neighbours.
        keys, values: float32 [B, M, K, D], of the block.
        pool: keys and values of pages, float32 [L, pages, K, page_size, D].
        layer: which layer of the pool.
        table: int32 [B, pages of a row]; -1 where there is none.
        prefix_len: int32 [B], tokens in pages.
        visible: uint32 [B, N, words], bits of the block's keys that each node sees.

    Returns:
        float32 [B, N, H, D].
    """
    name = register(attention_source, _unit_for(queries.shape[-1]))
    result = jax.ShapeDtypeStruct(queries.shape, jnp.float32)
    which = jnp.asarray(layer, jnp.int32)
    return jax.ffi.ffi_call(name, result)(queries, keys, values, *pool, which, table, prefix_len, visible)


def _unit_for(head_dim: int) -> VectorUnit:
    """The host's vectors, or shorter ones that a head fills."""
    unit = host_unit()
    lanes = unit.lanes
    while head_dim % lanes:
        lanes //= 2
    return dataclasses.replace(unit, lanes=lanes)
