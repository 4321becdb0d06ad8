"""Rotary position embeddings as a config.json words them. Imports no jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.models.fields import read_number, read_object, read_optional, read_switch, read_text

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; half-split (rotate-half) order.

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
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def read_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Both wordings into one: fields that the kind does not use are left at their defaults."""
    said = dict(read_object(config, "rope_scaling") or read_object(config, "rope_parameters"))
    if any(isinstance(value, Mapping) for value in said.values()):
        raise ValueError(
            f"rope parameters by layer type ({', '.join(said)}) are not supported; one rope for all layers."
        )
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


def yarn_mscale(factor: float, mscale: float) -> float:
    """What yarn multiplies scores by, as a root: 1 without a scaling (arXiv 2309.00071 section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
