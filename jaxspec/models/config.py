"""The settings of one model, read from a Hugging Face `config.json` in either wording. Imports no jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.models.families import FAMILIES
from jaxspec.models.fields import read_names, read_number, read_object, read_switch, read_text
from jaxspec.models.parts import MIXERS, MLPS, DeltaConfig, ExpertsConfig, LatentConfig, LayerKind
from jaxspec.models.rope_config import RopeConfig, read_rope

__all__ = ["ARCHITECTURE_OF_MODEL_TYPE", "KNOWN_ARCHITECTURES", "ModelConfig", "RopeConfig"]

# The keys of `jaxspec.models.MODELS`; kept here so that host files can read the names without importing jax.
KNOWN_ARCHITECTURES = tuple(FAMILIES)
# What a config.json without "architectures" means.
ARCHITECTURE_OF_MODEL_TYPE = {kind: name for name, family in FAMILIES.items() for kind in family.model_types}
_TEXT_MODEL_OF = {alias: name for name, family in FAMILIES.items() for alias in family.aliases}
MAX_LAYERS = 1024  # far above any model: more is a damaged file
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder's sizes and switches; hashable, so that it can be a static argument.

    Attributes:
        architecture: one of `KNOWN_ARCHITECTURES`.
        max_position: longest context in tokens.
        tie_embeddings: the output head is the embedding table.
        qkv_bias, o_bias, mlp_bias: which projections carry a bias.
        qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
        hidden_act: one of `ACTIVATIONS`.
        rotary_dim: leading numbers of a head that are rotated; None is all.
        rope_interleaved: neighbours are rotary pairs, instead of numbers half a head apart.
        attention_scale: factor on the scores; None is head_dim^-0.5.
        gated_attention: each head's output is multiplied by a sigmoid that the query projection makes beside it.
        window: what a layer with a window sees, in tokens, itself included.
        window_rope: the rope of those layers.
        norm_offset: norms multiply by 1 + w instead of w.
        post_norms: what a layer's two parts add is normed once more before.
        scale_embedding: embeddings are multiplied by sqrt(hidden_size), rounded to the weights' dtype.
        mixers: each layer's `LayerKind.mixer`; empty is "full" for all.
        mlps: each layer's `LayerKind.mlp`; empty is "dense" for all.
        experts, latent, delta: of the layers that have them.
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
    rotary_dim: int | None = None
    rope_interleaved: bool = False
    attention_scale: float | None = None
    gated_attention: bool = False
    window: int | None = None
    window_rope: RopeConfig | None = None
    norm_offset: bool = False
    post_norms: bool = False
    scale_embedding: bool = False
    mixers: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None

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
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act={self.hidden_act!r} is not supported; the known are {', '.join(ACTIVATIONS)}."
            )
        if self.rotary_dim is not None and not (2 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0):
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even, at least 2 and at most {self.head_dim}.")
        self._check_layers()

    def _check_layers(self) -> None:
        """Raises ValueError where the layers' kinds are not known, not one a layer, or lack their settings."""
        for name, kinds, known in (("mixers", self.mixers, MIXERS), ("mlps", self.mlps, MLPS)):
            if kinds and len(kinds) != self.num_layers:
                raise ValueError(f"{name} are said of {len(kinds)} layers, and num_layers={self.num_layers}.")
            if strange := sorted(set(kinds) - set(known)):
                raise ValueError(f"{name} holds {', '.join(map(repr, strange))}; the known are {', '.join(known)}.")
        needs = {"window": "window", "latent": "latent", "delta": "delta", "experts": "experts"}
        for kind, name in needs.items():
            if kind in (*self.mixers, *self.mlps) and getattr(self, name) is None:
                raise ValueError(f"layers of kind {kind!r} need {name}, which is None.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window={self.window} must be at least 1.")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        mixers = self.mixers or ("full",) * self.num_layers
        return tuple(map(LayerKind, mixers, self.mlps or ("dense",) * self.num_layers))

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """The mixers that there are, each with one cache, in the order of their first layers."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.layer_kinds))

    @property
    def has_recurrent_state(self) -> bool:
        """Whether a state stands for the tokens so far, which cannot be taken back to an earlier one."""
        return "delta" in self.cache_kinds

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a `config.json`: transformers-5 wording (rope_parameters) or public wording (rope_theta, rope_scaling).

        Raises:
            ValueError: an unknown architecture, rope type or activation, a feature that the family's decoder lacks, or
                a missing size.
        """
        architecture = _architecture(config)
        config = _text_config(config)
        own = FAMILIES[architecture].read(config)
        heads = read_number(config, "num_attention_heads", int)
        hidden = read_number(config, "hidden_size", int)
        max_position = read_number(config, "max_position_embeddings", int)
        activation = config.get("hidden_act") or "silu"
        fields: dict[str, Any] = {
            "vocab_size": read_number(config, "vocab_size", int),
            "hidden_size": hidden,
            "num_layers": read_number(config, "num_hidden_layers", int),
            "num_heads": heads,
            "num_kv_heads": read_number(config, "num_key_value_heads", int, default=heads),
            "head_dim": read_number(config, "head_dim", int, default=hidden // max(heads, 1)),
            "rms_norm_eps": read_number(config, "rms_norm_eps", float, default=1e-6),
            "max_position": max_position,
            "tie_embeddings": read_switch(config, "tie_word_embeddings"),
            "hidden_act": "silu" if activation == "swish" else activation,  # two names of one function
        }
        if "intermediate_size" not in own:
            fields["intermediate_size"] = read_number(config, "intermediate_size", int)
        if "rope" not in own:
            fields["rope"] = read_rope(config, max_position)
        return cls(architecture=architecture, **{**fields, **own})


def _architecture(config: Mapping[str, Any]) -> str:
    """The architecture's name; what the wrapper says goes before what its text_config says, where we know it."""
    names = []
    for part in (config, read_object(config, "text_config")):
        said, kind = read_names(part, "architectures"), read_text(part, "model_type")
        names += [_TEXT_MODEL_OF.get(name, name) for name in said[:1]]
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
