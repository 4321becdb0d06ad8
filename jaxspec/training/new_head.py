"""A head for a target, new or to be trained further: what it starts from, and which tokens it chooses from."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.head import load_head, open_head
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.decoder import Segment
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.training.examples import Example
from jaxspec.training.export import export_head
from jaxspec.training.student import DTYPES, DraftSettings, Student, Target
from jaxspec.training.teacher import Leaves, head_rows

DRAFT_VOCAB = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSettings(DraftSettings):
    """A head on the target's features.

    Attributes:
        layers: 0-based layers of the target that a new EAGLE-3 head reads; None are the usual three.
        draft_vocab: tokens that a new head chooses from, the most frequent ones in the answers; None is `DRAFT_VOCAB`.
        init: a head to train further; None makes a new one.
        fused: an EAGLE-3 head; False is an EAGLE head, which is only trained further.
    """

    layers: tuple[int, ...] | None = None
    draft_vocab: int | None = None
    init: str | None = None
    fused: bool = True

    def begin(self, target: Target, examples: Sequence[Example], *, seed: int) -> Student:
        """Makes or loads the head; see `DraftSettings.begin`."""
        vocab_size = target.network.config.vocab_size
        if self.init is None:
            if not self.fused:
                raise ValueError("a new EAGLE head is not trained; set init to one, or fused=True (EAGLE3).")
            capture = self.layers or usual_layers(target.network.config.num_layers)
            count = min(DRAFT_VOCAB, vocab_size) if self.draft_vocab is None else self.draft_vocab
            check_choice(target.network.config, capture, count)
            target_ids = frequent_ids(examples, vocab_size, count)
            network, leaves = new_head(target.network, target.leaves, capture, target_ids, seed=seed)
            frozen = ("embed_tokens", "target_ids")
        else:
            self._check_init()
            network, leaves, frozen = load_existing(Path(self.init), target, fused=self.fused)
            state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
            ids = state.get(("target_ids",))
            target_ids = np.arange(vocab_size, dtype=np.int32) if ids is None else np.asarray(ids.get_value())
        config = network.config
        return Student(
            kind="EAGLE-3 head" if config.fused else "EAGLE head",
            network=network,
            leaves=leaves,
            frozen=frozen,
            rows=head_rows(target.network, target.leaves, target_ids),
            capture=config.capture,
            about={
                "layers": list(config.capture),
                "draft_vocab": len(target_ids),
                "coverage": coverage(examples, vocab_size, target_ids),
            },
            write=functools.partial(export_head, network, dtype=DTYPES[self.export_dtype], frozen=frozen),
        )

    def _check_init(self) -> None:
        for name in ("layers", "draft_vocab"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect on init={self.init!r}, a head that says it itself; "
                    "leave one of them out."
                )


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs EAGLE-3 reads where nothing else is said: an early, a middle and a late one."""
    return (1, num_layers // 2 - 1, num_layers - 4) if num_layers >= 6 else tuple(range(num_layers))


def frequent_ids(examples: Iterable[Example], vocab_size: int, count: int) -> np.ndarray:
    """The `count` tokens that the target wrote most often, in the order of their ids, int32 [count].

    Ties, and what is missing, are filled with the tokens of the texts and then with the lowest ids.
    """
    written, seen = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(written, example.ids[example.is_answer], 1)
        np.add.at(seen, example.ids, 1)
    order = np.lexsort((np.arange(vocab_size), -seen, -written))
    return np.sort(order[:count]).astype(np.int32)


def coverage(examples: Iterable[Example], vocab_size: int, ids: np.ndarray) -> float:
    """The share of what the target wrote that is among `ids`."""
    written = np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(written, example.ids[example.is_answer], 1)
    return float(written[ids].sum() / max(1, written.sum()))


def load_existing(folder: Path, target: Target, *, fused: bool) -> tuple[Network, Leaves, tuple[str, ...]]:
    """A head to train further: network, float32 weights, and the leaves that stay the target's.

    Raises:
        FileNotFoundError, ValueError: it is no head, or of another target; or its form cannot be exported.
    """
    with open_checkpoint(folder) as checkpoint:
        file = open_head(checkpoint, target.network.config, fused=fused)
        if file.config.feed_normed:
            raise ValueError(
                f"{folder} feeds its next step with normed states, which the format of the exported head cannot say; "
                "train a new one."
            )
        network, leaves = load_head(file, target.network, target.leaves, dtype=np.float32)
        shared = (name for name in ("embed_tokens", "lm_head") if f"{name}.weight" not in file.stored)
    return network, leaves, ("target_ids", *shared)


def check_choice(target: ModelConfig, capture: Sequence[int], draft_vocab: int) -> None:
    """Raises ValueError where a layer or the number of tokens is beyond the target's."""
    outside = [layer for layer in capture if not 0 <= layer < target.num_layers]
    if outside or not capture:
        raise ValueError(f"layers={list(capture)} must be in 0..{target.num_layers - 1}; set at least one.")
    if not 1 <= draft_vocab <= target.vocab_size:
        raise ValueError(f"draft_vocab={draft_vocab} must be from 1 to {target.vocab_size}, the target's vocabulary.")


def head_config(target: ModelConfig, capture: Sequence[int], *, draft_vocab: int) -> HeadConfig:
    """A head of the target's own sizes."""
    # Drafts stay near their text, so that the target's scaling to long contexts is not needed.
    rope = RopeConfig(theta=target.rope.theta)
    layer = dataclasses.replace(target, architecture="LlamaForCausalLM", num_layers=1, rope=rope, tie_embeddings=False)
    plain = {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}
    return HeadConfig(
        layer=dataclasses.replace(layer, **plain),
        fused=True,
        capture=tuple(capture),
        target_hidden=target.hidden_size,
        target_embed=target.hidden_size,
        draft_vocab=draft_vocab,
        lm_head="table",
    )


def new_head(
    target: Network, target_leaves: Leaves, capture: Sequence[int], target_ids: np.ndarray, *, seed: int
) -> tuple[Network, Leaves]:
    """A head that starts from the target: embedding, vocabulary head, final norm, and its last layer.

    What the last layer has no counterpart for is random: how the head reads the embedding and the other features.
    Measured for SmolLM2, see docs/measurements.md, it learns faster than from random weights throughout.

    Args:
        target: and `target_leaves`, the model that it is to draft for.
        capture: 0-based layers that it reads.
        target_ids: int32 [draft_vocab], the tokens that it chooses from.
        seed: of the random weights.
    """
    config = head_config(target.config, capture, draft_vocab=len(target_ids))
    head = Head(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    model = target.bind(target_leaves)
    head.embed_tokens[...] = jnp.asarray(model.embed_tokens[...], jnp.float32)
    head.lm_head[...] = head_rows(target, target_leaves, target_ids).astype(jnp.float32)
    if head.norm is not None:
        head.norm.weight[...] = jnp.asarray(model.norm.weight[...], jnp.float32)
    start_as_layer(head, model.segments[-1])
    if head.target_ids is not None:
        head.target_ids[...] = jnp.asarray(target_ids)
    graphdef, state = nnx.split(head)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, Head, graphdef, treedef), tuple(leaves)


def start_as_layer(head: Head, layer: Segment) -> None:
    """Makes a head's layer one of its target's, which reads the last of the captured features."""
    wide = lambda weight: weight[...].astype(jnp.float32)  # noqa: E731
    own, width = head.layer, head.config.layer.hidden_size
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(own.mlp, name).weight[...] = wide(getattr(layer.mlp, name).weight)
    own.self_attn.o_proj.weight[...] = wide(layer.self_attn.o_proj.weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(own.self_attn, name).weight  # of [embedding; feature]
        weight[...] = weight[...].at[-width:].set(wide(getattr(layer.self_attn, name).weight))
    own.post_attention_layernorm.weight[...] = wide(layer.post_attention_layernorm.weight)
    if own.hidden_norm is not None:
        own.hidden_norm.weight[...] = wide(layer.input_layernorm.weight)
    head.fc.weight[...] = head.fc.weight[...].at[-width:].add(jnp.eye(width))
