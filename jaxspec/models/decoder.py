"""The dense decoder of Llama, SmolLM2, Qwen2 and Qwen3.

Layers live in segments. A segment is one layer, or equal layers whose weights are stacked and scanned; layers that
differ make segments of their own. Scanning reads the cache only (new keys and values leave as pending), so no pool is
ever copied through the scan.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import Block, TokenBlock
from jaxspec.kv_cache import Accepted, PagedKV
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import MLP, Attention, RMSNorm, init_weight, rotary_angles
from jaxspec.models.weights import Matrix, Table, dtype_of, look_up, multiply

Pending = tuple[jax.Array, jax.Array]


class Source(NamedTuple):
    """Where a checkpoint tensor goes: a leaf, or one layer's row of a stacked leaf."""

    path: tuple[str | int, ...]
    transpose: bool = False  # Hugging Face stores [out, in]; we multiply by [in, out]
    layer: int | None = None


class Extended(NamedTuple):
    """A block's outputs, before anything is committed."""

    hidden: jax.Array  # [B, N, E], before the final norm
    captured: tuple[jax.Array, ...]  # [B, N, E] each: what was asked for, in that order
    pending: tuple[Pending, ...]  # per cache: keys and values, [L, B, N, K, D]


class Segment(nnx.Module):
    """`size` equal layers; weights carry a leading axis when they are scanned."""

    def __init__(self, config: ModelConfig, size: int, *, scan: bool, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        lead = (size,) if scan else ()
        norm = {"eps": config.rms_norm_eps, "lead": lead, "dtype": dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, lead=lead, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, lead=lead, dtype=dtype, rngs=rngs)

    def extend_layer(
        self,
        x: jax.Array,
        angles: Pending,
        block: TokenBlock,
        cache: PagedKV | None,
        layer: int | jax.Array,
        earlier: Pending | None,
    ) -> tuple[jax.Array, Pending]:
        """One layer over x [B, N, E]."""
        out, pending = self.self_attn.extend(self.input_layernorm(x), angles, block, cache, layer, earlier)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), pending


class Decoder(nnx.Module):
    """A dense decoder-only transformer.

    Args:
        config: sizes and switches.
        dtype: of weights and activations; logits are float32.
        scan_layers: stack equal layers and scan over them (fewer leaves to dispatch, faster to trace; on the CPU the
            slices of stacked weights are copied, measured 20 % slower at one row).
        rngs: for random weights; None leaves zeros, to be filled from a checkpoint.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, scan_layers: bool, rngs: nnx.Rngs | None):
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = init_weight(rngs, size, dtype, Table if config.tie_embeddings else nnx.Param)
        sizes = [config.num_layers] if scan_layers else [1] * config.num_layers
        self.segments = nnx.List([Segment(config, n, scan=scan_layers, dtype=dtype, rngs=rngs) for n in sizes])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None if config.tie_embeddings else init_weight(rngs, size[::-1], dtype, Matrix)
        self.config = config
        self.scan_layers = scan_layers

    @classmethod
    def init_cache(
        cls, config: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype, backend: str = "xla"
    ) -> tuple[PagedKV, ...]:
        """Empty caches, one per layer kind; `backend` attends to them."""
        sizes = (config.num_layers, num_pages, config.num_kv_heads, page_size, config.head_dim)
        return (PagedKV.zeros(*sizes, dtype, backend),)

    def empty_pending(self, num_rows: int, num_nodes: int) -> tuple[Pending, ...]:
        """Room for the pending rows of `num_nodes` uncommitted nodes, to be passed as `earlier`."""
        config = self.config
        shape = (config.num_layers, num_rows, num_nodes, config.num_kv_heads, config.head_dim)
        dtype = dtype_of(self.embed_tokens)
        return ((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)),)

    def extend(
        self,
        tokens: jax.Array,
        block: TokenBlock,
        caches: tuple[PagedKV | None, ...],
        *,
        earlier: tuple[Pending, ...] | None = None,
        capture: Sequence[int | str] = (),
    ) -> Extended:
        """Runs a block of tokens against the committed prefix; commits nothing.

        Args:
            tokens: int32 [B, N]; -1 (no draft) reads row 0 of the embedding, and its outputs mean nothing.
            block: positions, prefix and ancestors.
            caches: from `init_cache`; None for a block that has no prefix.
            earlier: pending of uncommitted nodes before this block, as `Extended.pending`.
            capture: what `captured` is to hold: layers (0-based, their outputs), or "normed" (after the final norm).
        """
        (cache,) = caches
        before = None if earlier is None else earlier[0]
        x = look_up(self.embed_tokens, jnp.maximum(tokens, 0))
        angles = rotary_angles(self.config.rope, self.config.head_dim, block.positions)
        run = self._scan if self.scan_layers else self._unroll
        x, outputs, pending = run(x, angles, block, cache, before, any(isinstance(name, int) for name in capture))
        captured = tuple(self.norm(x) if name == "normed" else outputs[name] for name in capture)
        return Extended(x, captured, (pending,))

    def _unroll(self, x, angles, block, cache, earlier, keep) -> tuple[jax.Array, Any, Pending]:
        """Every layer in turn; the middle result is the layers' outputs, to be indexed by layer."""
        outputs, pendings = [], []
        for layer, segment in enumerate(self.segments):
            before = None if earlier is None else (earlier[0][layer], earlier[1][layer])
            x, pending = segment.extend_layer(x, angles, block, cache, layer, before)
            outputs.append(x)
            pendings.append(pending)
        keys, values = zip(*pendings, strict=True)
        return x, outputs, (jnp.stack(keys), jnp.stack(values))

    def _scan(self, x, angles, block, cache, earlier, keep) -> tuple[jax.Array, Any, Pending]:
        """The same as a scan; the layers' outputs are kept, stacked, only where `keep`."""
        graphdef, weights = nnx.split(self.segments[0])

        def step(x, per_layer):
            weights, layer, before = per_layer
            segment = nnx.merge(graphdef, weights)
            x, pending = segment.extend_layer(x, angles, block, cache, layer, before)
            return x, (x if keep else None, pending)

        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        x, (outputs, pending) = jax.lax.scan(step, x, (weights, layers, earlier))
        return x, outputs, pending

    def commit(
        self, caches: tuple[PagedKV, ...], pending: tuple[Pending, ...], block: Block, accepted: Accepted
    ) -> tuple[PagedKV, ...]:
        """Writes the accepted path of a block into every cache."""
        return tuple(cache.commit(rows, block, accepted) for cache, rows in zip(caches, pending, strict=True))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final norm and head: [..., E] -> float32 [..., V]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return multiply(self.norm(hidden), head, dtype=jnp.dtype(jnp.float32))[0]

    @classmethod
    def tensor_map(cls, config: ModelConfig, scan_layers: bool) -> dict[str, Source]:
        """Hugging Face tensor name -> where it goes."""
        found = {
            "model.embed_tokens.weight": Source(("embed_tokens",)),
            "model.norm.weight": Source(("norm", "weight")),
        }
        if not config.tie_embeddings:
            found["lm_head.weight"] = Source(("lm_head",), transpose=True)
        for layer in range(config.num_layers):
            lead = ("segments", 0 if scan_layers else layer)
            row = layer if scan_layers else None
            for name, transpose in layer_tensors(config):
                path = (*lead, *name.split("."))
                found[f"model.layers.{layer}.{name}"] = Source(path, transpose, row)
        return found

    @classmethod
    def ignored(cls, config: ModelConfig) -> tuple[str, ...]:
        """Tensors that checkpoints may carry and the model does not need."""
        tables = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")
        # Some repositories store the tied head all the same.
        return (*tables, "lm_head.weight") if config.tie_embeddings else tables


def layer_tensors(config: ModelConfig) -> list[tuple[str, bool]]:
    """Names of one layer's tensors, and whether each is transposed."""
    biases = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    found = [("input_layernorm.weight", False), ("post_attention_layernorm.weight", False)]
    for name, bias in biases.items():
        found.append((f"self_attn.{name}_proj.weight", True))
        if bias:
            found.append((f"self_attn.{name}_proj.bias", False))
    if config.qk_norm:
        found += [("self_attn.q_norm.weight", False), ("self_attn.k_norm.weight", False)]
    for name in ("gate", "up", "down"):
        found.append((f"mlp.{name}_proj.weight", True))
        if config.mlp_bias:
            found.append((f"mlp.{name}_proj.bias", False))
    return found
