"""What a draft head's config.json says, in both dialects.

SGLang, SpecForge and the EAGLE repository write one flat config and count captured layers by their outputs. speculators
nests the decoder layer's config and counts the layer that the features go into, one more. The key norm_output means
different things in the two, so the dialect decides, and never a key alone.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.models.config import ARCHITECTURE_OF_MODEL_TYPE, KNOWN_ARCHITECTURES, ModelConfig
from jaxspec.models.fields import (
    read_ints,
    read_names,
    read_number,
    read_object,
    read_optional,
    read_switch,
    read_text,
)
from jaxspec.models.heads import HeadConfig
from jaxspec.plan import Note

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# What a class says where a config does not; it sizes nothing, because rotary angles are computed and not looked up.
TRAINED_LEN = 2048
# Values of speculators_model_type that are read.
SPECULATORS_TYPES = ("eagle3",)


class _Said(NamedTuple):
    """A head's config, past its dialect."""

    layer: Mapping[str, Any]  # the decoder layer's config
    switches: dict[str, bool]  # of HeadConfig
    capture: tuple[int, ...] | None  # outputs of layers; None is not said
    id_shift: int  # what the file's layer ids are above ours
    draft_vocab: int | None
    target_hidden: int | None
    rope_is_targets: bool  # whose positions an unsaid rope is


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config is in the speculators dialect."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def read_head_config(
    config: Mapping[str, Any], names: Collection[str], target: ModelConfig, path: Path, *, fused: bool
) -> tuple[HeadConfig, list[Note]]:
    """Returns a head's sizes and switches, and a note for each that the config leaves open.

    Args:
        config: the head's config.json.
        names: of the tensors, without "model."; they say what is the target's.
        target: the model that it drafts for.
        path: of the checkpoint, for messages.
        fused: EAGLE-3, else EAGLE.

    Raises:
        ValueError: the config lacks a size, has a value of another type, is of an unknown kind, or does not fit the
            target.
    """
    notes: list[Note] = []
    try:
        said = _speculators(config) if is_speculators(config) else _flat(config, fused)
        layer = _layer_config(said, target, notes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if layer.vocab_size != target.vocab_size:
        raise ValueError(
            f"{path}: the head was made for a vocabulary of vocab_size={layer.vocab_size}, and the target has "
            f"{target.vocab_size}; set draft_model to a head of this target."
        )
    if said.target_hidden not in (None, target.hidden_size):
        raise ValueError(
            f"{path}: the head reads features of target_hidden_size={said.target_hidden}, and the target's have "
            f"hidden_size={target.hidden_size}; set draft_model to a head of this target."
        )
    head = HeadConfig(
        layer=layer,
        fused=fused,
        capture=_capture(said, target, path, notes) if fused else ("normed",),
        target_hidden=target.hidden_size,
        target_embed=layer.hidden_size,
        draft_vocab=_draft_vocab(said, target, path),
        lm_head=_lm_head(layer, names, target),
        **said.switches,
    )
    _check_shared(head, names, target, path)
    return head, notes


def _flat(config: Mapping[str, Any], fused: bool) -> _Said:
    """SGLang, SpecForge, the EAGLE repository."""
    eagle = read_object(config, "eagle_config")
    if LAYER_IDS in config and LAYER_IDS not in eagle:
        raise ValueError(
            f"config.json has {LAYER_IDS} outside eagle_config, where it is not clear how layers are counted; "
            "move it into eagle_config, as 0-based layers whose outputs are read."
        )
    if fused and not read_switch(eagle, "use_aux_hidden_state", default=True):
        raise ValueError(
            "eagle_config has use_aux_hidden_state=false: an EAGLE3 head without layers to read is not "
            "supported; use a head with use_aux_hidden_state=true."
        )
    either = {**eagle, **{name: value for name, value in config.items() if value is not None}}
    # EAGLE's first heads have a bias and no word about it; "bias": false came later, and vLLM's name for it after.
    bias = read_switch(config, "eagle_fc_bias", default=read_switch(either, "bias", default=True))
    switches = {"fc_bias": bias and not fused, "final_norm": read_switch(either, "norm_output", default=True) and fused}
    if fused:
        switches |= {name: read_switch(either, name) for name in ("norm_before_residual", "fc_norm", "norm_before_fc")}
    return _Said(
        layer=config,
        switches=switches,
        capture=read_ints(eagle, LAYER_IDS),
        id_shift=0,
        draft_vocab=read_optional(config, "draft_vocab_size", int),
        target_hidden=read_optional(config, "target_hidden_size", int),
        rope_is_targets=False,
    )


def _speculators(config: Mapping[str, Any]) -> _Said:
    kind = config.get("speculators_model_type", SPECULATORS_TYPES[0])
    layer = config.get("transformer_layer_config")
    if kind not in SPECULATORS_TYPES or not isinstance(layer, Mapping):
        raise ValueError(
            f"speculators_model_type={kind!r} with transformer_layer_config={type(layer).__name__} is not "
            f"supported; of this dialect, heads of type {', '.join(SPECULATORS_TYPES)} with their config are read."
        )
    switches = {name: read_switch(config, name) for name in ("norm_before_residual", "fc_norm", "norm_before_fc")}
    ids = read_ints(config, LAYER_IDS)
    return _Said(
        layer=layer,
        switches={**switches, "feed_normed": read_switch(config, "norm_output")},
        capture=None if ids is None else tuple(index - 1 for index in ids),
        id_shift=1,
        draft_vocab=read_optional(config, "draft_vocab_size", int),
        target_hidden=read_optional(config, "target_hidden_size", int),
        rope_is_targets=True,
    )


def _layer_config(said: _Said, target: ModelConfig, notes: list[Note]) -> ModelConfig:
    """The decoder layer's sizes, with what the config omits filled in."""
    layer = dict(said.layer)
    layer["num_hidden_layers"] = read_number(layer, "num_hidden_layers", int, default=1)
    if layer["num_hidden_layers"] != 1:
        raise ValueError(
            f"a head of num_hidden_layers={layer['num_hidden_layers']} is not supported; set draft_model to a head "
            "of one layer, or algorithm='STANDALONE' if this is a whole model."
        )
    layer["architectures"] = [family_of(layer)]
    if layer.get("max_position_embeddings") is None:
        layer["max_position_embeddings"] = target.max_position if said.rope_is_targets else TRAINED_LEN
        reason = "the head's config has none; the length it was trained on is no limit"
        notes.append(Note("draft_max_position", None, layer["max_position_embeddings"], reason))
    theta, scaling = said_rope(layer)
    if said.rope_is_targets and theta is None:
        layer["rope_theta"] = target.rope.theta
        notes.append(Note("draft_rope_theta", None, target.rope.theta, "the head's config has none: the target's"))
        read = ModelConfig.from_hf(layer)
        return read if scaling else dataclasses.replace(read, rope=target.rope)
    read = ModelConfig.from_hf(layer)
    if theta is None:
        reason = "the head's config has none, and its class is trained with this; set rope_theta there if it was not"
        notes.append(Note("draft_rope_theta", None, read.rope.theta, reason))
    if not scaling and target.rope.kind != read.rope.kind:
        reason = f"the head's config has none, and the target's ({target.rope.kind}) is not taken for it"
        notes.append(Note("draft_rope_scaling", None, read.rope.kind, reason))
    return read


def said_rope(layer: Mapping[str, Any]) -> tuple[object, bool]:
    """rope_theta wherever it stands, and whether there is a scaling."""
    parts = [layer, read_object(layer, "rope_scaling"), read_object(layer, "rope_parameters")]
    found = [part["rope_theta"] for part in parts if part.get("rope_theta") is not None]
    kinds = {read_text(part, "rope_type") or read_text(part, "type") for part in parts[1:]}
    return next(iter(found), None), bool(kinds - {None, "default"})


def family_of(layer: Mapping[str, Any]) -> str:
    """The model family that the decoder layer is of."""
    kind = read_text(layer, "model_type")
    if kind in ARCHITECTURE_OF_MODEL_TYPE:
        return ARCHITECTURE_OF_MODEL_TYPE[kind]
    name = next(iter(read_names(layer, "architectures")), "None")
    return next((known for known in KNOWN_ARCHITECTURES if name.startswith(known)), name)


def _capture(said: _Said, target: ModelConfig, path: Path, notes: list[Note]) -> tuple[int, ...]:
    """The layers whose outputs a head reads."""
    layers, ids = target.num_layers, said.capture
    if ids is None:
        ids = (1, layers // 2 - 1, layers - 4)
        named = [index + said.id_shift for index in ids]
        notes.append(Note(LAYER_IDS, None, named, f"the head's config names none: the usual ones of {layers} layers"))
    outside = [index + said.id_shift for index in ids if not 0 <= index < layers]
    if outside or not ids:
        low, high = said.id_shift, layers - 1 + said.id_shift
        raise ValueError(
            f"{path}: the head reads layers {[index + said.id_shift for index in ids]}, and the target has {layers}; "
            f"set draft_model to a head of this target, or {LAYER_IDS} in its config.json to layers in {low}..{high}."
        )
    return ids


def _draft_vocab(said: _Said, target: ModelConfig, path: Path) -> int:
    size = target.vocab_size if said.draft_vocab is None else said.draft_vocab
    if not 1 <= size <= target.vocab_size:
        raise ValueError(
            f"{path}: draft_vocab_size={size} is not in 1..{target.vocab_size}, the target's vocabulary; "
            "correct it in the head's config.json."
        )
    return size


def _lm_head(layer: ModelConfig, names: Collection[str], target: ModelConfig) -> str:
    """What makes the logits, see `HeadConfig.lm_head`: the head's own, else what is tied, else the target's."""
    own_embedding = "embed_tokens.weight" in names
    if "lm_head.weight" in names:
        return "matrix"
    if own_embedding:
        return "embedding" if layer.tie_embeddings else ("table" if target.tie_embeddings else "matrix")
    return "embedding" if target.tie_embeddings else "matrix"


def _check_shared(head: HeadConfig, names: Collection[str], target: ModelConfig, path: Path) -> None:
    """Raises where a head cannot use what it takes from the target."""
    hidden, other = head.layer.hidden_size, target.hidden_size
    if not head.fused and hidden != other:
        raise ValueError(
            f"{path}: an EAGLE head predicts the target's own features, and hidden_size={hidden} is not the target's "
            f"{other}; set draft_model to a head of this target."
        )
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in names]
    if missing and hidden != other and not (head.lm_head == "embedding" and missing == ["lm_head.weight"]):
        raise ValueError(
            f"{path}: the head lacks {' and '.join(missing)} and cannot use the target's, as its hidden_size={hidden} "
            f"is not the target's {other}; set draft_model to a head of this target, or one that has them."
        )
    if "lm_head.weight" in missing and head.has_map:
        raise ValueError(
            f"{path}: the head chooses from draft_vocab_size={head.draft_vocab} tokens and has no lm_head.weight for "
            f"them; use a checkpoint that has it, or set draft_vocab_size={target.vocab_size} for the target's."
        )
