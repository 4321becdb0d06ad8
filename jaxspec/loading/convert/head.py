"""Converts a draft head between the dialects of its checkpoint, and checks that both are the same head."""

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.loading.checkpoint import Checkpoint, FolderCheckpoint, open_checkpoint
from jaxspec.loading.convert.head_dialect import FUSED, KINDS, PLAIN, Kind, rename, to_flat, to_speculators
from jaxspec.loading.convert.output import Summary, check_output, staged_folder, write_json
from jaxspec.loading.convert.tensors import Tensor, stored_tensor, write_safetensors
from jaxspec.loading.head import HeadFile, is_fused_head, open_head, stored_names
from jaxspec.loading.head_config import LAYER_IDS, SPECULATORS_TYPES, is_speculators, said_rope
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.fields import read_ints, read_object
from jaxspec.models.heads import Head

DIALECTS = ("sglang", "speculators")
_ROPE_KEYS = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
_CARRIED = ("d2t", "t2d")
_UNREAD = "*.rotary_emb.inv_freq"


def convert_head(
    source: str | os.PathLike[str],
    out: Path,
    *,
    to: str,
    target: str | os.PathLike[str] | None = None,
    verifier: str | None = None,
    overwrite: bool = False,
) -> Summary:
    """Writes an EAGLE or EAGLE-3 head in the other dialect: config.json and model.safetensors.

    Args:
        source: the head's folder.
        out: the folder to make.
        to: one of `DIALECTS`.
        target: the model that it drafts for; needed where a speculators config leaves the rope to it.
        verifier: the target's name for a speculators config.
        overwrite: replace a checkpoint at `out`.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: a file is missing, in the way, damaged or no head, or the
            dialect cannot say what the head is.
    """
    if to not in DIALECTS:
        raise ValueError(f"dialect {to!r} is not known; set one of {', '.join(DIALECTS)}.")
    checkpoint = open_checkpoint(source)
    check_output(out, source=checkpoint.path, overwrite=overwrite)
    kind = _kind(checkpoint)
    if is_speculators(checkpoint.config) == (to == DIALECTS[1]):
        raise ValueError(f"{checkpoint.path} is in the {to} dialect already.")
    model = None if target is None else open_checkpoint(target)
    rope = {} if to == DIALECTS[1] else _rope_of_target(checkpoint, model)
    read = _stand_in(checkpoint.config) if model is None else ModelConfig.from_hf(model.config)
    before = _opened(checkpoint, read, kind)
    config, changes = _converted(checkpoint, kind, before, to, rope, verifier)
    tensors = _renamed(checkpoint, kind, before, to, changes)
    with staged_folder(out, source=checkpoint.path, overwrite=overwrite) as folder:
        write_safetensors(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", config)
        after = _opened(open_checkpoint(folder), read, kind)
        if before is not None and after is not None:
            _check_equal(before, after)
    return Summary.of(out, tensors, changes)


def _kind(checkpoint: Checkpoint) -> Kind:
    """What kind of head it is; ValueError if it is none."""
    names = {} if not isinstance(checkpoint, FolderCheckpoint) else stored_names(checkpoint)
    said = checkpoint.config.get("speculators_model_type", SPECULATORS_TYPES[0])
    if is_speculators(checkpoint.config):
        if said not in KINDS or not isinstance(checkpoint.config.get("transformer_layer_config"), Mapping):
            raise ValueError(
                f"{checkpoint.path}: speculators_model_type={said!r} is not converted; {' and '.join(KINDS)} are, "
                "with their transformer_layer_config."
            )
        kind = KINDS[said]
    else:
        kind = FUSED if is_fused_head(checkpoint.config, names) else PLAIN
    speculators = is_speculators(checkpoint.config)
    fc = rename("fc.weight", kind, to_speculators=True) if speculators else "fc.weight"
    if fc not in names:
        raise ValueError(f"{checkpoint.path} is not an EAGLE or EAGLE3 head: it has no tensor {fc}.")
    return kind


def _opened(checkpoint: Checkpoint, target: ModelConfig, kind: Kind) -> HeadFile | None:
    """The head as jaxspec reads it, its tensors' names checked; None for the one form that it does not read."""
    if is_speculators(checkpoint.config) and kind.type not in SPECULATORS_TYPES:
        return None
    file = open_head(checkpoint, target, fused=kind.fused)
    layer = "midlayer" if any(name.startswith("midlayer.") for name in file.stored) else "layers.0"
    places = Head.tensor_map(file.config, layer)
    optional = {"embed_tokens.weight", "lm_head.weight", *_CARRIED}
    missing = sorted(set(places) - set(file.stored) - optional)
    strange = [name for name in file.stored if name not in {*places, *optional} and not fnmatch.fnmatch(name, _UNREAD)]
    if missing or strange:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(strange)}"] * bool(strange)
        raise ValueError(f"{checkpoint.path} {' and '.join(parts)}: not a head that jaxspec reads.")
    return file


def _stand_in(config: Mapping[str, Any]) -> ModelConfig:
    """A target that fits what the head's config says, for a head that comes without its own."""
    layer = config.get("transformer_layer_config", config)
    ids = read_ints(config, LAYER_IDS) or read_ints(read_object(config, "eagle_config"), LAYER_IDS) or (15,)
    sizes = {"vocab_size": layer.get("vocab_size"), "hidden_size": config.get("target_hidden_size")}
    sizes["hidden_size"] = sizes["hidden_size"] or layer.get("hidden_size")
    if not all(isinstance(size, int) for size in sizes.values()):
        raise ValueError(f"the head's config has {sizes}; expected whole numbers.")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        **sizes,
        intermediate_size=1,
        num_layers=max(ids) + 1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        max_position=1,
        rope=RopeConfig(),
    )


def _rope_of_target(checkpoint: Checkpoint, model: Checkpoint | None) -> dict[str, Any]:
    """What a speculators config leaves to the target, in a config's words."""
    layer = checkpoint.config["transformer_layer_config"]
    theta, scaling = said_rope(layer)
    unsaid = ["rope_theta"] * (theta is None) + ["max_position_embeddings"] * (
        layer.get("max_position_embeddings") is None
    )
    if not unsaid:
        return {}
    if model is None:
        raise ValueError(
            f"{checkpoint.path}: its config leaves {' and '.join(unsaid)} to the target, and the SGLang dialect has to "
            "say it; name the target with --target."
        )
    target, words = ModelConfig.from_hf(model.config), model.config.get("text_config") or model.config
    found: dict[str, Any] = {}
    if theta is None:
        found["rope_theta"] = target.rope.theta
        found |= {} if scaling else {name: words[name] for name in _ROPE_KEYS if words.get(name) is not None}
    if "max_position_embeddings" in unsaid:
        found["max_position_embeddings"] = target.max_position
    return found


def _converted(
    checkpoint: Checkpoint,
    kind: Kind,
    before: HeadFile | None,
    to: str,
    rope: Mapping[str, Any],
    verifier: str | None,
) -> tuple[dict[str, Any], list[str]]:
    try:
        if to == DIALECTS[0]:
            return to_flat(checkpoint.config, kind, stored_names(checkpoint), rope=rope)
        bias = before is not None and before.config.fc_bias
        return to_speculators(checkpoint.config, kind, fc_bias=bias, verifier=verifier)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error


def _renamed(
    checkpoint: Checkpoint, kind: Kind, before: HeadFile | None, to: str, changes: list[str]
) -> dict[str, Tensor]:
    """The tensors under their new names; says in `changes` what is new."""
    speculators = to == DIALECTS[1]
    names = stored_names(checkpoint)
    tensors = {
        rename(bare, kind, to_speculators=speculators): stored_tensor(checkpoint, name) for bare, name in names.items()
    }
    for flat, other in kind.names:
        changes.append(f"{flat}* became {other}*" if speculators else f"{other}* became {flat}*")
    if any(name != bare for bare, name in names.items()):
        changes.append('"model." taken off names')
    if speculators and kind.fused and before is not None and before.target_ids is not None and "t2d" not in tensors:
        marks = np.zeros(before.config.layer.vocab_size, bool)
        marks[before.target_ids] = True
        tensors["t2d"] = Tensor(marks.dtype, marks.shape, lambda: marks)
        changes.append("t2d made from d2t")
    return tensors


def _check_equal(before: HeadFile, after: HeadFile) -> None:
    """Raises if the two dialects do not read as one head."""
    if before.config != after.config:
        raise ValueError(
            f"{before.checkpoint.path} cannot be converted: it would read as {after.config}, and it is {before.config}."
        )
    # A head without a map has none in either dialect: the configs, which say so, are equal.
    old, new = (() if file.target_ids is None else file.target_ids for file in (before, after))
    if not np.array_equal(old, new):
        raise ValueError(f"{before.checkpoint.path} cannot be converted: its vocabulary map would differ.")
