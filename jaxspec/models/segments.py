"""A model's layers in order, in segments of equal ones, and the caches of their kinds.

A segment is one layer, or neighbours of one kind whose weights are stacked and scanned. Scanning reads the cache only
(new keys and values leave as pending), so no pool is ever copied through the scan.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import TokenBlock
from jaxspec.kv_cache import Cache, CacheSizes
from jaxspec.models.config import ModelConfig
from jaxspec.models.delta import DeltaNet
from jaxspec.models.experts import Experts
from jaxspec.models.latent import LatentAttention
from jaxspec.models.layers import MLP, Angles, Attention, WindowAttention, norm_of, rotary_angles
from jaxspec.models.parts import LayerKind

# Leaves of one cache's layers, [L, B, N, ...] each; of one layer without the L.
Pending: TypeAlias = tuple[jax.Array, ...]


class Mixer(Protocol):
    """What mixes tokens in a layer."""

    @classmethod
    def init_cache(cls, config: ModelConfig, num_layers: int, sizes: CacheSizes) -> Any:
        """An empty cache of `num_layers` such layers."""
        ...

    @classmethod
    def pending_shapes(cls, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of one token's pending leaves."""
        ...

    def extend(
        self,
        x: jax.Array,
        angles: Angles,
        block: TokenBlock,
        cache: Any,
        layer: int | jax.Array,
        earlier: Pending | None,
    ) -> tuple[jax.Array, Pending]:
        """Runs x [B, N, E]; returns the output and what the block leaves pending."""
        ...


# By the names in `LayerKind`.
MIXERS: dict[str, Any] = {
    "full": Attention,
    "window": WindowAttention,
    "latent": LatentAttention,
    "delta": DeltaNet,
}
MLPS: dict[str, Any] = {"dense": MLP, "experts": Experts}
# What the weights of a layer's mixer are under, as checkpoints have it.
MIXER_NAMES = {"full": "self_attn", "window": "self_attn", "latent": "self_attn", "delta": "linear_attn"}


class Run(NamedTuple):
    """Neighbouring layers that make a segment."""

    kind: LayerKind
    first: int  # layer of the model
    size: int
    first_in_cache: int  # layer of its kind's cache


def runs_of(config: ModelConfig, scan_layers: bool) -> list[Run]:
    """The segments: equal neighbours together where layers are scanned, else each layer alone."""
    runs: list[Run] = []
    counts = dict.fromkeys(config.cache_kinds, 0)
    first = 0
    for kind, group in groupby(config.layer_kinds):
        count = len(list(group))
        for size in [count] if scan_layers else [1] * count:
            runs.append(Run(kind, first, size, counts[kind.mixer]))
            counts[kind.mixer] += size
            first += size
    return runs


class Segment(nnx.Module):
    """`size` equal layers; weights carry a leading axis when they are scanned."""

    self_attn: Any  # where the mixer is attention, see MIXER_NAMES

    def __init__(
        self, config: ModelConfig, kind: LayerKind, size: int, *, scan: bool, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ):
        lead = (size,) if scan else ()
        how: dict[str, Any] = {"lead": lead, "dtype": dtype}
        self.input_layernorm = norm_of(config, config.hidden_size, **how)
        setattr(self, MIXER_NAMES[kind.mixer], MIXERS[kind.mixer](config, rngs=rngs, **how))
        self.post_attention_layernorm = norm_of(config, config.hidden_size, **how)
        self.mlp = MLPS[kind.mlp](config, rngs=rngs, **how)
        if config.post_norms:
            self.pre_feedforward_layernorm = norm_of(config, config.hidden_size, **how)
            self.post_feedforward_layernorm = norm_of(config, config.hidden_size, **how)
        self.mixer_name, self.post_norms, self.scan = MIXER_NAMES[kind.mixer], config.post_norms, scan

    def extend_layer(
        self,
        x: jax.Array,
        angles: Angles,
        block: TokenBlock,
        cache: Cache | None,
        layer: int | jax.Array,
        earlier: Pending | None,
    ) -> tuple[jax.Array, Pending]:
        """One layer over x [B, N, E]."""
        mixer: Mixer = getattr(self, self.mixer_name)
        out, pending = mixer.extend(self.input_layernorm(x), angles, block, cache, layer, earlier)
        if not self.post_norms:
            x = x + out
            return x + self.mlp(self.post_attention_layernorm(x)), pending
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), pending

    def extend(
        self, x: jax.Array, angles: Angles, block: TokenBlock, cache: Any, run: Run, earlier: Pending | None, keep: bool
    ) -> tuple[jax.Array, list[jax.Array], Pending]:
        """All its layers; outputs of each where `keep`, and pending leaves [size, B, N, ...]."""
        if not self.scan:
            before = None if earlier is None else tuple(leaf[0] for leaf in earlier)
            x, pending = self.extend_layer(x, angles, block, cache, run.first_in_cache, before)
            return x, [x], tuple(leaf[None] for leaf in pending)
        graphdef, weights = nnx.split(self)

        def step(x: jax.Array, per_layer: tuple[Any, jax.Array, Pending | None]) -> tuple[jax.Array, Any]:
            weights, layer, before = per_layer
            x, pending = nnx.merge(graphdef, weights).extend_layer(x, angles, block, cache, layer, before)
            return x, (x if keep else None, pending)

        layers = run.first_in_cache + jnp.arange(run.size, dtype=jnp.int32)
        x, (outputs, pending) = jax.lax.scan(step, x, (weights, layers, earlier))
        return x, [outputs[index] for index in range(run.size)] if keep else [], pending


def build_segments(config: ModelConfig, *, scan_layers: bool, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> nnx.List:
    """Segments of all the model's layers, in order."""
    return nnx.List(
        [
            Segment(config, run.kind, run.size, scan=scan_layers, dtype=dtype, rngs=rngs)
            for run in runs_of(config, scan_layers)
        ]
    )


def init_caches(config: ModelConfig, sizes: CacheSizes) -> tuple[Cache, ...]:
    """Empty caches, one per mixer, in the order of `cache_kinds`."""
    mixers = [kind.mixer for kind in config.layer_kinds]
    return tuple(MIXERS[name].init_cache(config, mixers.count(name), sizes) for name in config.cache_kinds)


def empty_pending(config: ModelConfig, num_rows: int, num_nodes: int, dtype: jnp.dtype) -> tuple[Pending, ...]:
    """Room for the pending leaves of `num_nodes` uncommitted nodes, by cache."""
    mixers = [kind.mixer for kind in config.layer_kinds]
    return tuple(
        tuple(
            jnp.zeros((mixers.count(name), num_rows, num_nodes, *shape), dtype)
            for shape in MIXERS[name].pending_shapes(config)
        )
        for name in config.cache_kinds
    )


def run_segments(
    segments: Sequence[Segment],
    config: ModelConfig,
    x: jax.Array,
    block: TokenBlock,
    caches: Sequence[Any],
    earlier: tuple[Pending, ...] | None,
    *,
    scan_layers: bool,
    keep: bool,
) -> tuple[jax.Array, list[jax.Array], tuple[Pending, ...]]:
    """Runs all layers over x [B, N, E]: the result, each layer's output where `keep`, and pending by cache."""
    ropes = {name: config.window_rope if name == "window" else config.rope for name in config.cache_kinds}
    size = config.rotary_dim or config.head_dim
    angles = {name: rotary_angles(rope or config.rope, size, block.positions) for name, rope in ropes.items()}
    places = {name: place for place, name in enumerate(config.cache_kinds)}
    outputs: list[jax.Array] = []
    pending: list[list[Pending]] = [[] for _ in places]
    for segment, run in zip(segments, runs_of(config, scan_layers), strict=True):
        name, at = run.kind.mixer, slice(run.first_in_cache, run.first_in_cache + run.size)
        place = places[name]
        before = None if earlier is None else tuple(leaf[at] for leaf in earlier[place])
        x, made, rows = segment.extend(x, angles[name], block, caches[place], run, before, keep)
        outputs += made
        pending[place].append(rows)
    return x, outputs, tuple(_joined(parts) for parts in pending)


def _joined(parts: list[Pending]) -> Pending:
    """Pending leaves of several segments as one."""
    if len(parts) == 1:
        return parts[0]
    return tuple(jnp.concatenate(leaves) for leaves in zip(*parts, strict=True))
