"""What each model family's config.json means beyond what all have: one record a family. Imports no jax.

A family is a function from the config to fields of `ModelConfig`, and a line in `FAMILIES`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from jaxspec.models.fields import read_ints, read_names, read_number, read_object, read_optional, read_switch, read_text
from jaxspec.models.own_draft import DEEPSEEK_DRAFT, QWEN_DRAFT, OwnDraft
from jaxspec.models.parts import DeltaConfig, ExpertsConfig, LatentConfig
from jaxspec.models.rope_config import read_rope, yarn_mscale

Config: TypeAlias = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    Attributes:
        model_types: what stands for it in a config without "architectures".
        read: its own fields of `ModelConfig`, from the config.
        aliases: architectures of wrappers whose text model it is.
        own_draft: of its own draft layers, None where it has none.
    """

    model_types: tuple[str, ...]
    read: Callable[[Config], dict[str, Any]]
    aliases: tuple[str, ...] = ()
    own_draft: OwnDraft | None = None


def _llama(config: Config) -> dict[str, Any]:
    _refuse_other_attention(config)
    bias = read_switch(config, "attention_bias")
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": read_switch(config, "mlp_bias")}


def _qwen2(config: Config) -> dict[str, Any]:
    _refuse_other_attention(config)
    # It has no bias switch: queries, keys and values always carry one.
    return {"qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    _refuse_other_attention(config)
    bias = read_switch(config, "attention_bias")
    # The head size does not follow from the hidden size; the family's own default is 128.
    head_dim = read_number(config, "head_dim", int, default=128)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "head_dim": head_dim}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    experts = ExpertsConfig(
        num_experts=_num_experts(config),
        topk=read_number(config, "num_experts_per_tok", int),
        size=read_number(config, "moe_intermediate_size", int),
        scores="softmax",
        renormalise=read_switch(config, "norm_topk_prob"),
    )
    return {**_qwen3(config), "experts": experts, "mlps": _sparse_layers(config)}


def _gemma3(config: Config) -> dict[str, Any]:
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.get(name) is not None:
            raise ValueError(f"{name}={config[name]} is not supported; only null is.")
    if read_switch(config, "use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention=true is not supported; a decoder sees what came before.")
    num_layers = read_number(config, "num_hidden_layers", int)
    pattern = read_number(config, "sliding_window_pattern", int, default=6)
    bias = read_switch(config, "attention_bias")
    names = {"sliding_attention": "window", "full_attention": "full"}
    ropes = _ropes_by_layer_type(config)
    max_position = read_number(config, "max_position_embeddings", int)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "head_dim": read_number(config, "head_dim", int, default=256),
        "hidden_act": read_text(config, "hidden_activation") or "gelu_pytorch_tanh",
        "mixers": _mixers(config, num_layers, names, ("window",) * (pattern - 1) + ("full",)),
        "window": read_number(config, "sliding_window", int, default=4096),
        "rope": read_rope(ropes["full_attention"], max_position),
        "window_rope": read_rope(ropes["sliding_attention"], max_position),
        "attention_scale": read_number(config, "query_pre_attn_scalar", float, default=256.0) ** -0.5,
        "norm_offset": True,
        "post_norms": True,
        "scale_embedding": True,
        "tie_embeddings": read_switch(config, "tie_word_embeddings", default=True),
    }


def _ropes_by_layer_type(config: Config) -> dict[str, Config]:
    """A config for `read_rope` of each layer type, from either wording."""
    said = read_object(config, "rope_parameters")
    bare = {name: value for name, value in config.items() if name not in ("rope_parameters", "rope_scaling")}
    if "full_attention" in said:
        return {
            name: {**bare, "rope_parameters": read_object(said, name)}
            for name in ("full_attention", "sliding_attention")
        }
    theta = read_number(config, "rope_theta", float, default=1e6)
    local = read_number(config, "rope_local_base_freq", float, default=10000.0)
    return {"full_attention": {**config, "rope_theta": theta}, "sliding_attention": {**bare, "rope_theta": local}}


def _deepseek_v3(config: Config) -> dict[str, Any]:
    for name, known in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"), ("moe_layer_freq", 1)):
        if config.get(name, known) != known:
            raise ValueError(f"{name}={config[name]!r} is not supported; only {known!r} is.")
    if read_switch(config, "attention_bias"):
        raise ValueError("attention_bias=true is not supported with latent attention.")
    latent = LatentConfig(
        query_rank=read_number(config, "q_lora_rank", int),
        rank=read_number(config, "kv_lora_rank", int),
        key_size=read_number(config, "qk_nope_head_dim", int),
        rotated_size=read_number(config, "qk_rope_head_dim", int),
        value_size=read_number(config, "v_head_dim", int),
    )
    size = read_number(config, "moe_intermediate_size", int)
    experts = ExpertsConfig(
        num_experts=read_number(config, "n_routed_experts", int),
        topk=read_number(config, "num_experts_per_tok", int),
        size=size,
        scores="sigmoid",
        renormalise=read_switch(config, "norm_topk_prob", default=True),
        has_bias=True,
        num_groups=read_number(config, "n_group", int, default=1),
        topk_groups=read_number(config, "topk_group", int, default=1),
        scale=read_number(config, "routed_scaling_factor", float, default=1.0),
        shared_size=size * read_number(config, "n_shared_experts", int, default=0),
    )
    num_layers = read_number(config, "num_hidden_layers", int)
    num_dense = min(read_number(config, "first_k_dense_replace", int, default=0), num_layers)
    rope = read_rope(config, read_number(config, "max_position_embeddings", int))
    stretch = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return {
        "num_kv_heads": read_number(config, "num_attention_heads", int),
        "head_dim": latent.rotated_size,
        "mixers": ("latent",) * num_layers,
        "mlps": ("dense",) * num_dense + ("experts",) * (num_layers - num_dense),
        "latent": latent,
        "experts": experts,
        "rope": rope,
        "attention_scale": (latent.key_size + latent.rotated_size) ** -0.5 * stretch**2,
        "rope_interleaved": read_switch(config, "rope_interleave", default=True),
    }


def _qwen3_next(config: Config) -> dict[str, Any]:
    num_layers = read_number(config, "num_hidden_layers", int)
    return {
        **_gated_delta(config, grouped=True),
        "experts": _experts_with_a_shared_one(config, read_switch(config, "norm_topk_prob", default=True)),
        "intermediate_size": read_number(config, "intermediate_size", int, default=1),
        "mlps": _sparse_layers(config) if num_layers else (),
    }


def _qwen3_5(config: Config) -> dict[str, Any]:
    return _gated_delta(config, grouped=False)


def _qwen3_5_moe(config: Config) -> dict[str, Any]:
    num_layers = read_number(config, "num_hidden_layers", int)
    return {
        **_gated_delta(config, grouped=False),
        "experts": _experts_with_a_shared_one(config, renormalise=True),
        "intermediate_size": read_number(config, "intermediate_size", int, default=1),  # no layer is dense
        "mlps": ("experts",) * num_layers,
    }


def _gated_delta(config: Config, *, grouped: bool) -> dict[str, Any]:
    """What hybrids of delta rule and gated attention have in common."""
    if not read_switch(config, "attn_output_gate", default=True):
        raise ValueError("attn_output_gate=false is not supported; the family's attention has a gate.")
    num_layers = read_number(config, "num_hidden_layers", int)
    interval = read_number(config, "full_attention_interval", int, default=4)
    names = {"linear_attention": "delta", "full_attention": "full"}
    bias = read_switch(config, "attention_bias")
    head_dim = read_number(config, "head_dim", int, default=256)
    share = read_optional({**config, **read_object(config, "rope_parameters")}, "partial_rotary_factor", float)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * (0.25 if share is None else share)),
        "gated_attention": True,
        "norm_offset": True,
        "mixers": _mixers(config, num_layers, names, ("delta",) * (interval - 1) + ("full",)),
        "delta": DeltaConfig(
            num_key_heads=read_number(config, "linear_num_key_heads", int),
            num_value_heads=read_number(config, "linear_num_value_heads", int),
            key_size=read_number(config, "linear_key_head_dim", int),
            value_size=read_number(config, "linear_value_head_dim", int),
            kernel=read_number(config, "linear_conv_kernel_dim", int, default=4),
            grouped=grouped,
        ),
    }


def _experts_with_a_shared_one(config: Config, renormalise: bool) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=_num_experts(config),
        topk=read_number(config, "num_experts_per_tok", int),
        size=read_number(config, "moe_intermediate_size", int),
        scores="softmax",
        renormalise=renormalise,
        shared_size=read_number(config, "shared_expert_intermediate_size", int),
        gates_shared=True,
    )


def _num_experts(config: Config) -> int:
    other = read_optional(config, "num_local_experts", int)
    return read_number(config, "num_experts", int, default=other)


def _sparse_layers(config: Config) -> tuple[str, ...]:
    """Which layers have experts: every `decoder_sparse_step`th but for `mlp_only_layers`."""
    dense = read_ints(config, "mlp_only_layers") or ()
    step = read_number(config, "decoder_sparse_step", int, default=1)
    layers = range(read_number(config, "num_hidden_layers", int))
    return tuple("dense" if layer in dense or (layer + 1) % step else "experts" for layer in layers)


def _mixers(config: Config, num_layers: int, names: Mapping[str, str], pattern: tuple[str, ...]) -> tuple[str, ...]:
    """Each layer's mixer: as `layer_types` says in the words of `names`, else by a pattern that repeats."""
    said = read_names(config, "layer_types")
    other = sorted(set(said) - set(names))
    if other:
        raise ValueError(f"layer_types holds {', '.join(map(repr, other))}; the family has {', '.join(names)}.")
    if said:
        return tuple(names[kind] for kind in said)
    return tuple(pattern[layer % len(pattern)] for layer in range(num_layers))


def _refuse_other_attention(config: Config) -> None:
    """Names a setting that would change the result and that the dense families do not have."""
    if read_switch(config, "use_sliding_window") and config.get("sliding_window") is not None:
        raise ValueError(f"use_sliding_window=true with sliding_window={config['sliding_window']} is not supported.")
    other = sorted({kind for kind in read_names(config, "layer_types") if kind != "full_attention"})
    if other:
        raise ValueError(f"layer_types holds {', '.join(map(repr, other))}; only 'full_attention' is supported.")
    if read_switch(config, "rope_interleaved"):
        raise ValueError("rope_interleaved=true is not supported; rotary pairs are half a head apart.")
    partial = read_object(config, "rope_parameters").get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial} is not supported; the whole head is rotated.")


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_types=("llama",), read=_llama),
    "Qwen2ForCausalLM": Family(model_types=("qwen2",), read=_qwen2),
    "Qwen3ForCausalLM": Family(model_types=("qwen3",), read=_qwen3),
    "Qwen3MoeForCausalLM": Family(model_types=("qwen3_moe",), read=_qwen3_moe),
    "Gemma3ForCausalLM": Family(model_types=("gemma3_text",), read=_gemma3),
    "DeepseekV3ForCausalLM": Family(model_types=("deepseek_v3",), read=_deepseek_v3, own_draft=DEEPSEEK_DRAFT),
    "Qwen3NextForCausalLM": Family(model_types=("qwen3_next",), read=_qwen3_next, own_draft=QWEN_DRAFT),
    "Qwen3_5ForCausalLM": Family(
        model_types=("qwen3_5_text", "qwen3_5"),
        read=_qwen3_5,
        aliases=("Qwen3_5ForConditionalGeneration",),
        own_draft=QWEN_DRAFT,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        read=_qwen3_5_moe,
        aliases=("Qwen3_5MoeForConditionalGeneration",),
        own_draft=QWEN_DRAFT,
    ),
}
