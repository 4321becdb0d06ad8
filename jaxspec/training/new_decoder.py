"""A small model to draft for a target (STANDALONE): what it starts from."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models import MODELS, ModelConfig
from jaxspec.models.network import Network
from jaxspec.training.examples import Example
from jaxspec.training.export import export_decoder
from jaxspec.training.student import DTYPES, DraftSettings, Student, Target
from jaxspec.training.teacher import Leaves, head_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSettings(DraftSettings):
    """A small decoder of the target's family, with its vocabulary.

    Attributes:
        layers: 0-based layers of the target that it starts from, in this order; needs the target's width.
        num_layers: of a decoder that starts at random; None is 2, or as many as `layers` has.
        hidden_size: its width, a multiple of the head's; None is the target's. A narrower one starts from what the
            principal components of the target's embedding keep.
    """

    layers: tuple[int, ...] | None = None
    num_layers: int | None = None
    hidden_size: int | None = None

    def begin(self, target: Target, examples: Sequence[Example], *, seed: int) -> Student:
        """Makes the decoder; see `DraftSettings.begin`."""
        sizes = self._sizes(target.network.config)
        values: dict[str, Any] = {**target.config, **sizes, "tie_word_embeddings": True}
        config = ModelConfig.from_hf(values)
        network, leaves = new_decoder(config, target, self.layers, seed=seed)
        return Student(
            kind="STANDALONE draft",
            network=network,
            leaves=leaves,
            frozen=(),
            rows=head_rows(target.network, target.leaves, np.arange(config.vocab_size)),
            capture=(),
            about={**sizes, "layers": list(self.layers or ())},
            write=functools.partial(
                export_decoder,
                network,
                dtype=DTYPES[self.export_dtype],
                config=values,
                tokenizer=target.tokenizer,
            ),
        )

    def _sizes(self, target: ModelConfig) -> dict[str, int]:
        """What differs from the target's config.json."""
        outside = [layer for layer in self.layers or () if not 0 <= layer < target.num_layers]
        if outside or self.layers == ():
            raise ValueError(
                f"layers={list(self.layers or ())} must be in 0..{target.num_layers - 1}; name at least one."
            )
        count = len(self.layers) if self.layers else self.num_layers or 2
        if self.layers and self.num_layers not in (None, count):
            raise ValueError(f"num_layers={self.num_layers} and {count} layers to start from; leave one of them out.")
        width = self.hidden_size or target.hidden_size
        if self.layers and width != target.hidden_size:
            raise ValueError(
                f"layers of the target have hidden_size={target.hidden_size}, and hidden_size={width} is set; leave "
                "one of them out."
            )
        heads = width // target.head_dim
        if width % target.head_dim or not 1 <= width <= target.hidden_size:
            raise ValueError(
                f"hidden_size={width} must be a multiple of head_dim={target.head_dim}, up to the target's "
                f"{target.hidden_size}."
            )
        heads = target.num_heads if width == target.hidden_size else heads
        kv_heads = max(k for k in range(1, min(heads, target.num_kv_heads) + 1) if heads % k == 0)
        return {
            "hidden_size": width,
            "intermediate_size": target.intermediate_size * width // target.hidden_size,
            "num_hidden_layers": count,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": target.head_dim,
        }


def new_decoder(
    config: ModelConfig, target: Target, layers: Sequence[int] | None, *, seed: int
) -> tuple[Network, Leaves]:
    """A decoder with the target's embedding, as far as its width keeps it, as its embedding and vocabulary head.

    Args:
        config: its sizes.
        target: the model that it is to draft for.
        layers: layers of the target to start from; None are random ones.
        seed: of the random weights.
    """
    kind = MODELS[config.architecture]
    model = kind(config, dtype=jnp.dtype(jnp.float32), scan_layers=False, rngs=nnx.Rngs(seed))
    teacher = target.network.bind(target.leaves)
    model.embed_tokens[...] = narrowed(teacher.embed_tokens[...].astype(jnp.float32), config.hidden_size)
    if config.hidden_size == teacher.config.hidden_size:
        model.norm.weight[...] = teacher.norm.weight[...].astype(jnp.float32)
    for own, layer in zip(model.segments, layers or (), strict=False):
        nnx.update(own, nnx.state(teacher.segments[layer]))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), tuple(leaf.astype(jnp.float32) for leaf in leaves)


def narrowed(table: jax.Array, width: int) -> jax.Array:
    """Rows [V, E] in the coordinates of their `width` principal components [V, width]: products change least."""
    if width == table.shape[1]:
        return table
    _, components = jnp.linalg.eigh(table.T @ table)
    return table @ components[:, -width:]
