"""Tiny models of the families that bring their own draft layers, with random weights, and those layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.models import Decoder, ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.mtp import MTPConfig, MTPHead
from jaxspec.models.network import Network
from tests.tiny import VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
_HYBRID: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
}
_DEEPSEEK: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"]},
    "qwen3_next": {**_HYBRID, "architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5": {**_HYBRID, "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True},
    "qwen3_5_moe": {**_HYBRID, "architectures": ["Qwen3_5MoeForCausalLM"]},
}
NUM_LIKED = 4  # tokens that the targets prefer
Weights = tuple[Network, tuple[jax.Array, ...]]


def family_config(family: str) -> ModelConfig:
    return ModelConfig.from_hf(CONFIGS[family])


def mtp_config(family: str) -> MTPConfig:
    """Of the family's own draft layer."""
    target = family_config(family)
    own = FAMILIES[target.architecture].own_draft
    assert own is not None
    return MTPConfig.of(target, own)


def _class_of(config: ModelConfig | MTPConfig) -> tuple[Any, dict[str, Any]]:
    """What is built from a config, and with what besides."""
    return (Decoder, {"scan_layers": False}) if isinstance(config, ModelConfig) else (MTPHead, {})


def _abstract(config: ModelConfig | MTPConfig) -> tuple[Network, list[Any]]:
    """The definition of a target or of a draft layer, and the shapes of its leaves."""
    kind, how = _class_of(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: kind(config, dtype=jnp.dtype("float32"), rngs=None, **how)))
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), leaves


def network_of(config: ModelConfig | MTPConfig) -> Network:
    """The definition of a target or of a draft layer."""
    return _abstract(config)[0]


def _randomised(config: ModelConfig | MTPConfig, seed: int) -> Weights:
    """Every leaf random and large enough to matter, offsets of norms and exponents of decays too."""
    network, shapes = _abstract(config)
    rng = np.random.default_rng(seed)

    def randomise(leaf: Any) -> jax.Array:
        if leaf.ndim == 1:
            return jnp.asarray(rng.normal(1 - config_of(config).norm_offset, 0.3, leaf.shape), leaf.dtype)
        fan = leaf.shape[-1] if leaf.ndim == 3 and leaf.shape[1] == 1 else leaf.shape[-2]  # a convolution's kernel
        return jnp.asarray(rng.normal(0, 1.2 * fan**-0.5, leaf.shape), leaf.dtype)

    return network, tuple(map(randomise, shapes))


def config_of(config: ModelConfig | MTPConfig) -> ModelConfig:
    return config if isinstance(config, ModelConfig) else config.layer


@functools.cache
def family_model(family: str) -> Weights:
    """A target that prefers a few tokens, so that a random head on its vocabulary is right now and then."""
    network, leaves = _randomised(family_config(family), 1)
    model = network.bind(leaves)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    liked = (slice(NUM_LIKED),) if model.lm_head is None else (slice(None), slice(NUM_LIKED))
    head[...] = head[...].at[liked].multiply(4.0)
    return network, tuple(jax.tree.leaves(nnx.state(model)))


@functools.cache
def family_head(family: str) -> Weights:
    """Its own draft layer, with the target's embedding and vocabulary head."""
    (network, leaves), (target, theirs) = _randomised(mtp_config(family), 6), family_model(family)
    head, model = network.bind(leaves), target.bind(theirs)
    head.embed_tokens[...] = model.embed_tokens[...]
    if model.lm_head is not None:
        head.lm_head[...] = model.lm_head[...]
    return network, tuple(jax.tree.leaves(nnx.state(head)))
