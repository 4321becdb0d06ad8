"""Where the tensors of a checkpoint go, by Hugging Face's names in the one dialect of `jaxspec.loading.names`."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from jaxspec.models.config import ModelConfig
from jaxspec.models.parts import ExpertsConfig, LayerKind

# The layers of most models.
DENSE = LayerKind("full", "dense")


class Source(NamedTuple):
    """Where a checkpoint tensor goes: a leaf, or a part of a stacked one."""

    path: tuple[str | int, ...]
    transpose: bool = False  # Hugging Face stores [out, in]; we multiply by [in, out]
    layer: int | None = None  # of a leaf that stacks layers
    expert: int | None = None  # of a leaf that stacks experts
    columns: tuple[int, int] | None = None  # first and last + 1, of a leaf that holds several tensors side by side

    @property
    def index(self) -> tuple[int, ...]:
        """Its place in the leaf's leading axes."""
        return tuple(place for place in (self.layer, self.expert) if place is not None)


def layer_sources(
    config: ModelConfig, kind: LayerKind, path: tuple[str | int, ...], layer: int | None, *, is_stacked: bool = False
) -> dict[str, Source]:
    """One layer's tensors, by their names within the layer.

    Args:
        config: of the model.
        kind: of the layer.
        path: of its segment.
        layer: its place in the segment, None where that is one layer.
        is_stacked: the checkpoint has all experts of a layer in one tensor.
    """
    found = {
        name: Source((*path, *_LEAVES.get(name, tuple(name.split(".")))), transpose, layer)
        for name, transpose in layer_tensors(config, kind)
    }
    if kind.mlp == "experts" and config.experts is not None:
        place = (*path, "mlp")
        found |= _stacked(place, layer) if is_stacked else _by_expert(config.experts, place, layer)
    return found


# Leaves that are not where their tensors' names say.
_LEAVES: dict[str, tuple[str, ...]] = {
    "mlp.gate.weight": ("mlp", "gate"),
    "mlp.gate.e_score_correction_bias": ("mlp", "choice_bias"),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attn", "kv_a_proj", "weight"),
    "self_attn.kv_b_proj.weight": ("self_attn", "kv_b_proj"),
    "linear_attn.conv1d.weight": ("linear_attn", "conv"),
    "linear_attn.A_log": ("linear_attn", "log_rate"),
    "linear_attn.dt_bias": ("linear_attn", "time_bias"),
}


def _stacked(path: tuple[str | int, ...], layer: int | None) -> dict[str, Source]:
    return {f"mlp.experts.{name}_proj": Source((*path, f"{name}_proj"), True, layer) for name in ("gate_up", "down")}


def _by_expert(experts: ExpertsConfig, path: tuple[str | int, ...], layer: int | None) -> dict[str, Source]:
    size, found = experts.size, {}
    columns = {"gate": (0, size), "up": (size, 2 * size), "down": None}
    for expert in range(experts.num_experts):
        for name, place in columns.items():
            leaf = "down_proj" if place is None else "gate_up_proj"
            found[f"mlp.experts.{expert}.{name}_proj.weight"] = Source((*path, leaf), True, layer, expert, place)
    return found


def layer_tensors(config: ModelConfig, kind: LayerKind = DENSE) -> list[tuple[str, bool]]:
    """Names of one layer's tensors, routed experts aside, and whether each is transposed."""
    norms = ("input_layernorm", "post_attention_layernorm")
    if config.post_norms:
        norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    mixers = {"full": _attention, "window": _attention, "latent": _latent, "delta": _delta}
    return [
        *((f"{name}.weight", False) for name in norms),
        *mixers[kind.mixer](config),
        *(_experts(config) if kind.mlp == "experts" else _dense(config)),
    ]


def _attention(config: ModelConfig) -> Iterator[tuple[str, bool]]:
    biases = {"q": config.qkv_bias, "k": config.qkv_bias, "v": config.qkv_bias, "o": config.o_bias}
    for name, bias in biases.items():
        yield f"self_attn.{name}_proj.weight", True
        if bias:
            yield f"self_attn.{name}_proj.bias", False
    if config.qk_norm:
        yield from (("self_attn.q_norm.weight", False), ("self_attn.k_norm.weight", False))


def _latent(config: ModelConfig) -> Iterator[tuple[str, bool]]:
    for name in ("q_a", "q_b", "kv_b", "o"):
        yield f"self_attn.{name}_proj.weight", True
    yield "self_attn.kv_a_proj_with_mqa.weight", True
    yield from (("self_attn.q_a_layernorm.weight", False), ("self_attn.kv_a_layernorm.weight", False))


def _delta(config: ModelConfig) -> Iterator[tuple[str, bool]]:
    assert config.delta is not None
    for name in (*config.delta.projections, "out_proj"):
        yield f"linear_attn.{name}.weight", True
    for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight"):
        yield f"linear_attn.{name}", False


def _dense(config: ModelConfig, place: str = "mlp") -> Iterator[tuple[str, bool]]:
    for name in ("gate", "up", "down"):
        yield f"{place}.{name}_proj.weight", True
        if config.mlp_bias:
            yield f"{place}.{name}_proj.bias", False


def _experts(config: ModelConfig) -> Iterator[tuple[str, bool]]:
    experts = config.experts
    assert experts is not None
    yield "mlp.gate.weight", True
    if experts.has_bias:
        yield "mlp.gate.e_score_correction_bias", False
    if experts.shared_size:
        yield from _dense(config, "mlp.shared_expert")
    if experts.gates_shared:
        yield "mlp.shared_expert_gate.weight", True


def has_stacked_experts(names: Collection[str], prefix: str) -> bool:
    """Whether a checkpoint has all experts of a layer in one tensor."""
    return f"{prefix}mlp.experts.gate_up_proj" in names
