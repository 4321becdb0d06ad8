"""The settings of one model, read from a Hugging Face `config.json` in either wording. Imports no jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.models.fields import read_names, read_number, read_object, read_optional, read_switch, read_text

# The keys of `jaxspec.models.MODELS`; kept here so that host files can read the names without importing jax.
KNOWN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What a config.json without "architectures" means.
ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
MAX_LAYERS = 1024  # far above any model: more is a damaged file
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; half-split (rotate-half) order, over the whole head.

    Attributes:
        theta: base of the frequencies.
        kind: one of `ROPE_KINDS`; fields that a kind does not use keep their defaults, so that equals compare equal.
        factor: how many times longer the context becomes (linear, llama3, yarn).
        original_max_position: context length before the scaling (llama3, yarn), else None.
        low_freq_factor: llama3: wavelengths above original_max_position / low_freq_factor are divided by factor.
        high_freq_factor: llama3: wavelengths below original_max_position / high_freq_factor are kept.
        attention_factor: yarn: what cos and sin are multiplied by; None derives it, see `cos_sin_scale`.
        beta_fast: yarn: rotations over the original context from which a frequency is kept.
        beta_slow: yarn: rotations below which a frequency is divided by factor.
        mscale: yarn: numerator of the derived attention factor, None if not given.
        mscale_all_dim: yarn: denominator of the derived attention factor, None if not given.
        truncate: yarn: the ends of the ramp are rounded to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; the known types are {', '.join(ROPE_KINDS)}.")
        if self.theta <= 0 or self.factor <= 0:
            raise ValueError(f"rope theta={self.theta} and factor={self.factor} must be above 0.")
        if self.kind in ("llama3", "yarn") and not self.original_max_position:
            raise ValueError(f"rope type {self.kind!r} needs original_max_position; got {self.original_max_position}.")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}."
            )

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied by: 1 unless the kind is yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(self.factor, self.mscale_all_dim)
        return _yarn_mscale(self.factor, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder's sizes and switches; hashable, so that it can be a static argument.

    Attributes:
        architecture: one of `KNOWN_ARCHITECTURES`.
        max_position: longest context in tokens.
        tie_embeddings: the output head is the embedding table.
        qkv_bias, o_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"

    def __post_init__(self):
        if self.architecture not in KNOWN_ARCHITECTURES:
            raise ValueError(_unknown_architecture(self.architecture))
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and at least 2: rotary positions pair dimensions.")
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps={self.rms_norm_eps} must be at least 0 and below 1.")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers={self.num_layers} is more than {MAX_LAYERS}.")
        if self.max_position < 1:
            raise ValueError(f"max_position={self.max_position} must be at least 1.")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; the dense decoder has silu only.")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a `config.json`: transformers-5 wording (rope_parameters) or public wording (rope_theta, rope_scaling).

        Raises:
            ValueError: an unknown architecture or rope type, an activation other than silu, a sliding window in use,
                another feature that the decoder lacks, or a missing size.
        """
        architecture = _architecture(config)
        config = _text_config(config)
        _refuse_unsupported(config)
        heads = read_number(config, "num_attention_heads", int)
        hidden = read_number(config, "hidden_size", int)
        max_position = read_number(config, "max_position_embeddings", int)
        # Qwen2 has no bias switch: q, k and v always carry one. Elsewhere one switch covers all four projections.
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = read_switch(config, "attention_bias")
        activation = config.get("hidden_act") or "silu"
        return cls(
            architecture=architecture,
            vocab_size=read_number(config, "vocab_size", int),
            hidden_size=hidden,
            intermediate_size=read_number(config, "intermediate_size", int),
            num_layers=read_number(config, "num_hidden_layers", int),
            num_heads=heads,
            num_kv_heads=read_number(config, "num_key_value_heads", int, default=heads),
            head_dim=read_number(config, "head_dim", int, default=_default_head_dim(architecture, hidden, heads)),
            rms_norm_eps=read_number(config, "rms_norm_eps", float, default=1e-6),
            max_position=max_position,
            rope=_rope(config, max_position),
            tie_embeddings=read_switch(config, "tie_word_embeddings"),
            qkv_bias=is_qwen2 or attention_bias,
            o_bias=attention_bias and not is_qwen2,
            mlp_bias=architecture == "LlamaForCausalLM" and read_switch(config, "mlp_bias"),
            qk_norm=architecture == "Qwen3ForCausalLM",
            hidden_act="silu" if activation == "swish" else activation,  # two names of one function
        )


def _architecture(config: Mapping[str, Any]) -> str:
    """The architecture's name; what the wrapper says goes before what its text_config says, where we know it."""
    names = []
    for part in (config, read_object(config, "text_config")):
        said, kind = read_names(part, "architectures"), read_text(part, "model_type")
        names += said[:1]
        if kind in ARCHITECTURE_OF_MODEL_TYPE and not said:
            names.append(ARCHITECTURE_OF_MODEL_TYPE[kind])
    known = [name for name in names if name in KNOWN_ARCHITECTURES]
    if not known:
        raise ValueError(_unknown_architecture(names[0] if names else config.get("model_type")))
    return known[0]


def _unknown_architecture(name: object) -> str:
    return f"model architecture {name!r} is not supported; the known ones are {', '.join(KNOWN_ARCHITECTURES)}."


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings; the tie flag may sit only on the wrapper."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    if "tie_word_embeddings" in config:
        return {"tie_word_embeddings": config["tie_word_embeddings"], **inner}
    return inner


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Names a setting that would change the result and that the decoder does not have."""
    if read_switch(config, "use_sliding_window") and config.get("sliding_window") is not None:
        raise ValueError(f"use_sliding_window=true with sliding_window={config['sliding_window']} is not supported.")
    other = sorted({kind for kind in read_names(config, "layer_types") if kind != "full_attention"})
    if other:
        raise ValueError(f"layer_types holds {', '.join(map(repr, other))}; only 'full_attention' is supported.")
    if read_switch(config, "rope_interleaved"):
        raise ValueError("rope_interleaved=true is not supported; rotary pairs are half a head apart.")


def _default_head_dim(architecture: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3 is the one family whose head size does not follow from the hidden size; its own default is 128.
    return 128 if architecture == "Qwen3ForCausalLM" else hidden_size // max(num_heads, 1)


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both wordings into one: fields that the kind does not use are left at their defaults."""
    said = dict(read_object(config, "rope_scaling") or read_object(config, "rope_parameters"))
    if any(isinstance(value, Mapping) for value in said.values()):
        raise ValueError(
            f"rope parameters by layer type ({', '.join(said)}) are not supported; one rope for all layers."
        )
    partial = said.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial} is not supported; the whole head is rotated.")
    kind = read_text(said, "rope_type") or read_text(said, "type") or "default"
    theta = read_number({**config, **said}, "rope_theta", float, default=10000.0)
    if kind not in ROPE_KINDS or kind == "default":
        return RopeConfig(theta=theta, kind=kind)
    name = "original_max_position_embeddings"
    original = read_optional(config, name, int) or read_number(said, name, int, default=max_position)
    if kind == "yarn" and said.get("factor") is None:
        said["factor"] = max_position / original
    factor = read_number(said, "factor", float)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        low = read_number(said, "low_freq_factor", float)
        high = read_number(said, "high_freq_factor", float)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return _yarn(said, theta, factor, original)


def _yarn(said: Mapping[str, Any], theta: float, factor: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=read_optional(said, "attention_factor", float),
        # Zero means "not set" for both, as in the files that carry it.
        beta_fast=read_optional(said, "beta_fast", float) or 32.0,
        beta_slow=read_optional(said, "beta_slow", float) or 1.0,
        mscale=read_optional(said, "mscale", float),
        mscale_all_dim=read_optional(said, "mscale_all_dim", float),
        truncate=read_switch(said, "truncate", default=True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
