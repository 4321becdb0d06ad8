"""Attention of training-time test (EAGLE-3, arXiv 2503.01840): what each step of a chain sees when it drafts.

The anchor of a chain is the last pair whose feature is the target's own. Step 0 is that pair; step s > 0 is the pair s
places after it, with the head's own feature. It sees the target's features up to its anchor, and the steps of its own
chain. All anchors run at once: keys of step 0 are shared and seen causally, keys of later steps are each seen by one
chain only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.attention import Partial, merge, partial_attention


class UnrolledBlock(NamedTuple):
    """One step of the chains of some anchors, in place of `jaxspec.attention.Block`.

    Its keys are those of step 0, one for each token of the text, then one for each chain from each later step.
    """

    positions: jax.Array  # int32 [B, N], rotary: the anchor's place + the step
    anchors: jax.Array  # int32 [B, N], places in the text
    step: int

    def attend(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        pool: tuple[jax.Array, jax.Array] | None,
        layer: int | jax.Array,
        scale: float,
    ) -> jax.Array:
        """Attends from queries [B, N, H, D] to keys and values [B, T + step * N, K, D]: [B, N, H, D]."""
        del pool, layer  # a text is trained on whole: nothing comes before it
        num_rows, num_nodes, num_heads, width = queries.shape
        num_kv = keys.shape[2]
        num_true = keys.shape[1] - self.step * num_nodes
        folded = (queries * scale).reshape(num_rows, num_nodes, num_kv, -1, width).transpose(0, 2, 1, 3, 4)
        group = folded.shape[3]
        flat = folded.reshape(num_rows, num_kv, num_nodes * group, width)
        scores = jnp.einsum("bkqd,bskd->bkqs", flat, keys[:, :num_true], preferred_element_type=jnp.float32)
        visible = jnp.arange(num_true) <= jnp.repeat(self.anchors, group, axis=1)[..., None]
        shared = partial_attention(scores, visible[:, None], values[:, :num_true].transpose(0, 2, 1, 3))
        if self.step:
            out = merge(shared, self._own_steps(folded, keys[:, num_true:], values[:, num_true:]))
        else:
            out = shared.values / shared.mass[..., None]
        out = out.reshape(num_rows, num_kv, num_nodes, group, -1).transpose(0, 2, 1, 3, 4)
        return out.reshape(num_rows, num_nodes, num_heads, -1).astype(queries.dtype)

    def _own_steps(self, queries: jax.Array, keys: jax.Array, values: jax.Array) -> Partial:
        """Attends to the later steps: queries [B, K, N, G, D], keys and values [B, step * N, K, D]."""
        num_rows, num_kv, num_nodes, group, _ = queries.shape
        keys, values = (rows.reshape(num_rows, self.step, num_nodes, num_kv, -1) for rows in (keys, values))
        scores = jnp.einsum("bkngd,bsnkd->bkngs", queries, keys, preferred_element_type=jnp.float32)
        peak = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - peak[..., None])
        out = jnp.einsum("bkngs,bsnkd->bkngd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        flat = (num_rows, num_kv, num_nodes * group)
        return Partial(out.reshape(*flat, -1), peak.reshape(flat), jnp.sum(weights, axis=-1).reshape(flat))
