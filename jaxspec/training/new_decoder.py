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
from jaxspec.training.narrow import components, copy_narrowed, narrow_norm
from jaxspec.training.student import DTYPES, DraftSettings, Student, Target
from jaxspec.training.teacher import Leaves, head_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSettings(DraftSettings):
    """A small decoder of the target's family, with its vocabulary.

    Attributes:
        layers: 0-based layers of the target that it starts from, in this order; it has their heads and inner width.
        num_layers: of a decoder that starts at random; None is 2, or as many as `layers` has.
        hidden_size: its width; None is the target's. A narrower one starts from what the principal components of the
            target's embedding keep, and is a multiple of a head's width if its layers start at random.
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
        if not 1 <= width <= target.hidden_size:
            raise ValueError(f"hidden_size={width} must be from 1 to the target's {target.hidden_size}.")
        heads, kv_heads, inner = target.num_heads, target.num_kv_heads, target.intermediate_size
        if not self.layers and width != target.hidden_size:
            if width % target.head_dim:
                raise ValueError(f"hidden_size={width} must be a multiple of head_dim={target.head_dim}.")
            heads, inner = width // target.head_dim, inner * width // target.hidden_size
            kv_heads = max(k for k in range(1, min(heads, kv_heads) + 1) if heads % k == 0)
        return {
            "hidden_size": width,
            "intermediate_size": inner,
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
    table, norm = (leaf[...].astype(jnp.float32) for leaf in (teacher.embed_tokens, teacher.norm.weight))
    basis = None if config.hidden_size == teacher.config.hidden_size else components(table, config.hidden_size)
    model.embed_tokens[...] = table if basis is None else table @ basis
    model.norm.weight[...] = norm if basis is None else narrow_norm(norm, basis)
    for own, layer in zip(model.segments, layers or (), strict=False):
        if basis is None:
            nnx.update(own, nnx.state(teacher.segments[layer]))
        else:
            copy_narrowed(own, teacher.segments[layer], basis)
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), tuple(leaf.astype(jnp.float32) for leaf in leaves)
