"""A new EAGLE-3 head for a target: what it starts from, and which tokens it chooses from."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.training.examples import Example
from jaxspec.training.teacher import Leaves, head_rows


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose outputs EAGLE-3 reads where nothing else is said: an early, a middle and a late one."""
    return (1, num_layers // 2 - 1, num_layers - 4) if num_layers >= 6 else tuple(range(num_layers))


def frequent_ids(examples: Iterable[Example], vocab_size: int, count: int) -> tuple[np.ndarray, float]:
    """The `count` tokens that the target wrote most often, in the order of their ids, and their share of all it wrote.

    Ties, and what is missing, are filled with the tokens of the texts and then with the lowest ids.
    """
    written, seen = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(written, example.ids[example.is_answer], 1)
        np.add.at(seen, example.ids, 1)
    order = np.lexsort((np.arange(vocab_size), -seen, -written))
    ids = np.sort(order[:count]).astype(np.int32)
    return ids, float(written[ids].sum() / max(1, written.sum()))


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
    """A head with random weights; embedding, vocabulary head and final norm are the target's.

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
    if head.target_ids is not None:
        head.target_ids[...] = jnp.asarray(target_ids)
    graphdef, state = nnx.split(head)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, Head, graphdef, treedef), tuple(leaves)
