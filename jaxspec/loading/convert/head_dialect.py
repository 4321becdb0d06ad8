"""A draft head's config.json and tensor names from one dialect into the other; see `jaxspec.loading.head_config`.

What both say alike is left alone. That includes d2t, which holds offsets in both, and the matrices' order of rows.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxspec.loading.head_config import LAYER_IDS, TRAINED_LEN, family_of, said_rope

# Keys that stand at the top in both dialects, beside what describes the decoder layer.
_TOP = ("draft_vocab_size", "target_hidden_size", "torch_dtype", "dtype", "transformers_version")
_SWITCHES = ("norm_before_residual", "fc_norm", "norm_before_fc")
# The flat dialect keeps what only speculators has under this key, so that it comes back.
_KEPT = "speculators"
_DEFAULT_THETA = 10000.0
_VERSION = "0.1.0"


class Kind(NamedTuple):
    """A kind of head, as speculators names it."""

    fused: bool
    type: str
    architecture: str
    flat_ending: str  # of the architecture's name in the flat dialect
    names: tuple[tuple[str, str], ...]  # beginnings of tensor names: flat, speculators


FUSED = Kind(True, "eagle3", "Eagle3Speculator", "Eagle3", (("midlayer.", "layers.0."),))
PLAIN = Kind(False, "eagle", "EagleSpeculator", "", (("fc.", "fusion_fc."), ("layers.0.", "transformer.")))
KINDS = {kind.type: kind for kind in (FUSED, PLAIN)}


def rename(name: str, kind: Kind, *, to_speculators: bool) -> str:
    """A tensor's name, without "model.", in the other dialect."""
    for pair in kind.names:
        old, new = pair if to_speculators else reversed(pair)
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def to_speculators(
    config: Mapping[str, Any], kind: Kind, *, fc_bias: bool, verifier: str | None
) -> tuple[dict[str, Any], list[str]]:
    """A flat config in the speculators dialect, and what changed.

    Raises:
        ValueError: the dialect cannot say it.
    """
    rest = copy.deepcopy(dict(config))
    eagle = rest.pop("eagle_config", None) or {}
    said = {name: {**eagle, **rest}.get(name) for name in (*_SWITCHES, "norm_output")}
    for name in said:
        eagle.pop(name, None)
        rest.pop(name, None)
    if kind.fused and said["norm_output"] not in (None, True):
        raise ValueError("norm_output=false is a head without a final norm, which the speculators dialect cannot say.")
    kept = rest.pop(_KEPT, {})
    top = {name: rest.pop(name) for name in _TOP if name in rest}
    changes = _say_defaults(rest)
    layer = {**rest, "architectures": [family_of(rest)]}
    made: dict[str, Any] = {"architectures": [kind.architecture], "speculators_model_type": kind.type}
    if kind.fused:
        ids, _ = eagle.pop(LAYER_IDS, None), eagle.pop("use_aux_hidden_state", None)
        made |= {name: bool(said[name]) for name in _SWITCHES}
        if top.get("draft_vocab_size") is None:
            top["draft_vocab_size"] = layer.get("vocab_size")
        if ids is not None:
            made[LAYER_IDS] = [int(index) + 1 for index in ids]
            changes.append(f"layer ids {list(ids)} became {made[LAYER_IDS]}")
    else:
        layer = {name: value for name, value in layer.items() if name not in ("bias", "eagle_fc_bias")}
        made |= {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False, "fusion_bias": fc_bias}
    if eagle:
        made["eagle_config"] = eagle
    made |= top | {"tie_word_embeddings": bool(layer.get("tie_word_embeddings")), "transformer_layer_config": layer}
    made |= {**_defaults(kind), **kept}
    if verifier is not None:
        made["speculators_config"]["verifier"]["name_or_path"] = verifier
    if made["speculators_config"].get("verifier", {}).get("name_or_path") is None:
        changes.append("the verifier's name is left open (--verifier sets it)")
    return made, changes


def to_flat(
    config: Mapping[str, Any], kind: Kind, names: Collection[str], *, rope: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """A speculators config in the flat dialect, and what changed.

    Args:
        config: in the speculators dialect.
        kind: of the head.
        names: of its tensors, without "model.".
        rope: what the decoder layer's config leaves to the target; it goes before what is there.

    Raises:
        ValueError: the dialect cannot say it.
    """
    rest = copy.deepcopy(dict(config))
    if kind.fused and rest.pop("norm_output", None):
        raise ValueError("norm_output=true feeds the normed state back, which the SGLang dialect cannot say.")
    if rest.pop("layernorms", None):
        raise ValueError("layernorms=true is an EAGLE head with more norms, which the SGLang dialect cannot say.")
    layer = _unnested({**rest.pop("transformer_layer_config"), **rope})
    for name in ("architectures", "speculators_model_type", "tie_word_embeddings", "transformer_layer_architecture"):
        rest.pop(name, None)
    ids, eagle = rest.pop(LAYER_IDS, None), rest.pop("eagle_config", None) or {}
    top = {name: value for name in _TOP if (value := rest.pop(name, None)) is not None}
    if "lm_head.weight" not in names and top.get("draft_vocab_size") == layer.get("vocab_size"):
        top["draft_vocab_size"] = None  # how SGLang knows that the target's is used
    changes = [f"{', '.join(rope)} set from the target"] if rope else []
    flat = {**layer, **top, "architectures": [family_of(layer) + kind.flat_ending]}
    switches = {name: rest.pop(name, None) for name in _SWITCHES}
    if kind.fused:
        flat |= {name: True for name, on in switches.items() if on}
        if ids is not None:
            eagle[LAYER_IDS] = [int(index) - 1 for index in ids]
            changes.append(f"layer ids {list(ids)} became {eagle[LAYER_IDS]}")
        flat["eagle_config"] = {**eagle, "use_aux_hidden_state": True}
    else:
        flat["bias"] = bool(rest.pop("fusion_bias", False))
    defaults = _defaults(kind)
    if kept := {name: value for name, value in rest.items() if defaults.get(name) != value}:
        flat[_KEPT] = kept
        changes.append(f"{', '.join(kept)} kept under {_KEPT!r}")
    return flat, changes


def _say_defaults(layer: dict[str, Any]) -> list[str]:
    """Writes into a flat config what its dialect means where it says nothing; the other one would mean the target's."""
    added: dict[str, Any] = {}
    if said_rope(layer)[0] is None:
        added["rope_theta"] = _DEFAULT_THETA
    if layer.get("max_position_embeddings") is None:
        added["max_position_embeddings"] = TRAINED_LEN
    layer.update(added)
    layer.setdefault("num_hidden_layers", 1)
    return [f"{name}={value} said, which was the default" for name, value in added.items()]


def _unnested(layer: dict[str, Any]) -> dict[str, Any]:
    """transformers 5's rope_parameters as rope_theta and rope_scaling, which all readers of the flat dialect know."""
    nested = layer.pop("rope_parameters", None)
    if not nested:
        return layer
    nested = dict(nested)
    if "rope_theta" in nested:
        layer["rope_theta"] = nested.pop("rope_theta")
    if not layer.get("rope_scaling"):
        layer["rope_scaling"] = None if nested.get("rope_type", "default") == "default" else nested
    return layer


def _defaults(kind: Kind) -> dict[str, Any]:
    """What only speculators says, for a head that does not."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind.type,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }
