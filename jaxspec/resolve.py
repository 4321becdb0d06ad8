"""From the settings, the target and the draft to a plan without open values.

The order is: limits, alias, draft inspection, automatic values, consistency, and only then the schedule, so that no
value filled in late can ask for what the chosen schedule does not run.
"""

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxspec.attention_choice import AttentionNeeds, choose_backend
from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.draft_choice import KNOWN_ALGORITHMS, check_recurrent, check_topk, choose_algorithm, inspect_draft
from jaxspec.environment import is_on
from jaxspec.merge_choice import MERGED_NAMES, Merge, choose_merge, merged_shape, second_method
from jaxspec.plan import AUTO, FALLBACK, REFUSED_BY_STRICT, REQUESTED, WARNING, DraftInfo, Note, SpecPlan, TargetInfo
from jaxspec.rule_choice import RULE_SETTINGS, check_rule
from jaxspec.sglang_flags import SGLANG_ENVIRONMENT
from jaxspec.sizes import Sizes, choose_sizes
from jaxspec.tree_shape import PLAIN, TREE, TreeShape, automatic_chain, check_shape, check_steps, fill_shape, paths_of
from jaxspec.weight_layout import CpuKernels, choose_weight_dtype, choose_weight_layout

__all__ = ["KNOWN_ALGORITHMS", "DraftInfo", "Note", "SpecPlan", "TargetInfo", "resolve"]

# The algorithms, and their targets, for which a tree is the automatic choice.
TREE_TARGETS = {"EAGLE": ("LlamaForCausalLM",), "EAGLE3": ("LlamaForCausalLM",)}
SPEC_V2_VARIABLE = "JAXSPEC_ENABLE_SPEC_V2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Given:
    """The arguments of `resolve`, and the notes so far."""

    spec: SpecConfig | None
    engine: EngineConfig
    target: TargetInfo
    draft: DraftInfo | None
    env: Mapping[str, str]
    available: Collection[str]
    merge_draft: DraftInfo | None
    platform: str
    page_size_default: int
    max_total_tokens_default: int
    dtype_default: str
    scan_layers_default: bool
    cpu_kernels: CpuKernels | None
    compilation_cache_dir: str | None
    notes: list[Note] = dataclasses.field(default_factory=list)

    def note(self, field: str, before: object, after: object, reason: str, kind: str = AUTO) -> None:
        self.notes.append(Note(field, before, after, reason, kind))

    @property
    def v1_chosen(self) -> bool:
        """Whether the user asked for v1, be it by the setting or by the environment."""
        return self.engine.disable_overlap_schedule or not allows_v2(self.env)


def resolve(
    spec: SpecConfig | None,
    engine: EngineConfig,
    target: TargetInfo,
    draft: DraftInfo | None,
    env: Mapping[str, str],
    *,
    available: Collection[str],
    merge_draft: DraftInfo | None = None,
    platform: str = "cpu",
    page_size_default: int = 64,
    max_total_tokens_default: int,
    dtype_default: str = "float32",
    scan_layers_default: bool = False,
    cpu_kernels: CpuKernels | None = None,
    compilation_cache_dir: str | None = None,
) -> SpecPlan:
    """Returns the plan and its notes; reads nothing but its arguments.

    Args:
        spec: None is plain decoding.
        draft: the draft checkpoint, None where `spec` names none.
        env: the environment variables, read once by the caller.
        available: the algorithms of this version, as users name them ("NEXTN" where a target's own head runs).
        merge_draft: the draft checkpoint of the method that is merged in.
        platform: what this device is: "cpu", "tpu", or "gpu:" and its compute capability.
        page_size_default, ..., scan_layers_default: what a value that `engine` leaves open means on this device.
        cpu_kernels: what there is for weights on the CPU; None on other devices.
        compilation_cache_dir: the folder that compiled programs are kept in, None where they are not.

    Raises:
        ValueError: the settings contradict each other, the models or this version; or strict refuses a note.
    """
    given = _Given(
        spec=spec,
        engine=engine,
        target=target,
        draft=draft,
        env=env,
        available=available,
        merge_draft=merge_draft,
        platform=platform,
        page_size_default=page_size_default,
        max_total_tokens_default=max_total_tokens_default,
        dtype_default=dtype_default,
        scan_layers_default=scan_layers_default,
        cpu_kernels=cpu_kernels,
        compilation_cache_dir=compilation_cache_dir,
    )
    return _resolve(given)


def _resolve(given: _Given) -> SpecPlan:
    _check_dp_attention(given)
    allows_v2(given.env)  # a value that is neither yes nor no is an error, with speculation or without
    sizes = choose_sizes(
        given.engine,
        given.target,
        given.notes,
        speculates=given.spec is not None,
        page_size_default=given.page_size_default,
        max_total_tokens_default=given.max_total_tokens_default,
    )
    device = _device_choices(given, sizes)
    settings = given.spec or SpecConfig()
    algorithm, shape, rounds_in_flight = "NONE", PLAIN, 0 if given.engine.disable_overlap_schedule else 1
    merge = Merge()
    if given.spec is not None:
        algorithm = choose_algorithm(settings, given.target, given.available, given.notes)
        inspect_draft(settings, given.engine, given.target, given.draft, sizes.max_model_len, given.notes)
        shape = _shape(given, settings, algorithm, sizes.max_model_len)
        if settings.merge is None:
            check_shape(shape)
        check_steps("num_steps", shape.num_steps, sizes.max_model_len)
        check_topk(settings, algorithm, shape.eagle_topk, given.target, given.draft)
        if settings.merge is not None:
            length = sizes.max_model_len
            second = second_method(settings)
            choose_algorithm(second, given.target, given.available, given.notes, MERGED_NAMES)
            inspect_draft(second, given.engine, given.target, given.merge_draft, length, given.notes, MERGED_NAMES)
            merge = choose_merge(second, settings.merge_num_steps, length, given.notes)
            shape = merged_shape(settings, shape, merge.merge_num_steps, given.notes)
        check_recurrent(settings, _is_tree(settings, shape), given.target, (given.draft, given.merge_draft))
        rounds_in_flight = _rounds_in_flight(given, settings, shape)
        check_rule(settings, is_tree=_is_tree(settings, shape), notes=given.notes)
        _note_what_has_no_effect(given, settings, shape)
    elif rounds_in_flight and not allows_v2(given.env):
        reason = "no effect on plain decoding; set disable_overlap_schedule to have it wait for each step"
        given.note(SPEC_V2_VARIABLE, given.env[SPEC_V2_VARIABLE], None, reason, WARNING)
    _check_simulation(given, settings, max(shape.num_steps, merge.merge_num_steps) + 1)
    if settings.strict:
        _refuse_changes(given.notes)
    return SpecPlan(
        algorithm=algorithm,
        draft_model=None if settings.draft_model is None else os.fspath(settings.draft_model),
        **shape._asdict(),
        static_tree=paths_of(settings),
        **merge._asdict(),
        rounds_in_flight=rounds_in_flight,
        rounds_per_dispatch=given.engine.rounds_per_dispatch,
        prefix_caching=given.engine.prefix_caching,
        **{name: getattr(settings, name) for name in RULE_SETTINGS},
        shared_noise=settings.shared_noise,
        ngram_min_match=settings.ngram_min_match,
        ngram_max_match=settings.ngram_max_match,
        **sizes._asdict(),
        **device._asdict(),
        simulate_accept_len=given.engine.simulate_accept_len,
        notes=tuple(given.notes),
    )


def allows_v2(env: Mapping[str, str]) -> bool:
    """Reads the variable that rules out v2 under speculation; unset and empty allow it."""
    return is_on(env, SPEC_V2_VARIABLE, "set 1 for v2 or 0 for v1")


def _check_simulation(given: _Given, spec: SpecConfig, path_len: int) -> None:
    """Says that acceptance is simulated; refuses it where nothing could be."""
    length = given.engine.simulate_accept_len
    if length is None:
        return
    if given.spec is None:
        raise ValueError(f"simulate_accept_len={length:g} needs drafts to accept; set spec, or leave it out.")
    if length > path_len:
        raise ValueError(
            f"simulate_accept_len={length:g} is more than a round can emit; "
            f"set at most {path_len}, or num_steps to at least {math.ceil(length) - 1}."
        )
    if spec.accept_rule != "coupled":
        raise ValueError(
            f"simulate_accept_len={length:g} replaces what accept_rule={spec.accept_rule!r} would do; "
            "leave one of them out."
        )
    reason = "SIMULATED acceptance, for benchmarks alone: THE OUTPUT IS NOT THE MODEL'S; leave it out for real output"
    given.note("simulate_accept_len", length, length, reason, WARNING)


def _check_dp_attention(given: _Given) -> None:
    if not given.engine.enable_dp_attention:
        return
    if given.spec is not None and given.spec.algorithm == "STANDALONE":
        raise ValueError("algorithm='STANDALONE' does not run with enable_dp_attention=True; leave one of them out.")
    raise ValueError("enable_dp_attention=True is not in this version; leave it out.")


class _DeviceChoices(NamedTuple):
    """What suits the device; the fields are those of `SpecPlan`."""

    dtype: str
    attention_backend: str
    scan_layers: bool
    weight_layout: str
    weight_dtype: str


def _device_choices(given: _Given, sizes: Sizes) -> _DeviceChoices:
    engine, reason = given.engine, "automatic on this device"
    dtype, scan_layers = engine.dtype, engine.scan_layers
    if dtype == "auto":
        dtype = given.dtype_default
        given.note("dtype", "auto", dtype, f"{reason}; set dtype")
    layout = choose_weight_layout(given.env, dtype, engine.attention_backend, given.cpu_kernels, given.notes)
    weight_dtype = choose_weight_dtype(engine.weight_dtype, dtype, layout, given.notes)
    needs = AttentionNeeds(
        given.platform,
        dtype,
        sizes.page_size,
        sizes.max_running_requests,
        sizes.max_model_len,
        layout,
    )
    backend = choose_backend(engine.attention_backend, needs, given.notes)
    if scan_layers is None:
        scan_layers = given.scan_layers_default
        given.note("scan_layers", None, scan_layers, f"{reason}; set scan_layers")
    if engine.compilation_cache_dir == "auto" and given.compilation_cache_dir is not None:
        why = "compiled programs are kept there for the next start; set compilation_cache_dir, or None to keep none"
        given.note("compilation_cache_dir", "auto", given.compilation_cache_dir, why)
    return _DeviceChoices(dtype, backend, scan_layers, layout, weight_dtype)


def _shape(given: _Given, spec: SpecConfig, algorithm: str, max_model_len: int) -> TreeShape:
    """Returns the shape of the draft. A tree is automatic only where it does not cost the overlap unasked."""
    automatic, reason = automatic_chain(max_model_len)
    architecture = given.target.architecture
    prefers_tree = spec.draft_model is not None and architecture in TREE_TARGETS.get(algorithm, ())
    if prefers_tree and TREE.num_steps < max_model_len and spec.merge is None and spec.accept_rule != "rejection":
        if given.v1_chosen or spec.overlap_trees:
            automatic, reason = TREE, f"automatic for {algorithm} on {architecture}"
        else:
            reason = f"automatic: the tree {tuple(TREE)} would run on v1; set overlap_trees=True to have it on v2"
    own = spec
    if spec.merge is not None and (spec.static_tree is not None or (spec.eagle_topk or 1) == 1):
        own = dataclasses.replace(spec, num_draft_tokens=None)  # it counts the other method's drafts too
    shape, notes = fill_shape(own, automatic, reason, max_model_len)
    given.notes.extend(note for note in notes if spec.merge is None or note.field != "num_draft_tokens")
    return shape


def _is_tree(spec: SpecConfig, shape: TreeShape) -> bool:
    return shape.eagle_topk > 1 or spec.merge is not None


def _rounds_in_flight(given: _Given, spec: SpecConfig, shape: TreeShape) -> int:
    """Returns 1 (v2) or 0 (v1); of several reasons for v1, the note has the first in order of precedence."""
    if given.engine.disable_overlap_schedule:
        reason = "disable_overlap_schedule is set"
    elif _is_tree(spec, shape) and not spec.overlap_trees:
        form = f"eagle_topk={shape.eagle_topk}" if spec.merge is None else f"merge={spec.merge!r}"
        reason = f"a draft tree ({form}) runs on v1; set overlap_trees=True to run it on v2"
    elif not allows_v2(given.env):
        reason = f"{SPEC_V2_VARIABLE}={given.env[SPEC_V2_VARIABLE]}"
    else:
        return 1
    kind = REQUESTED if given.v1_chosen else FALLBACK
    given.note("rounds_in_flight", 1, 0, f"v1 instead of v2: {reason}", kind)
    return 0


def _note_what_has_no_effect(given: _Given, spec: SpecConfig, shape: TreeShape) -> None:
    if spec.overlap_trees and (given.v1_chosen or not _is_tree(spec, shape)):
        why = "v1 was chosen" if _is_tree(spec, shape) else "the draft is a chain"
        given.note("overlap_trees", True, None, f"no effect: {why}", WARNING)
    defaults = SpecConfig()
    if not spec.shared_noise and {spec.algorithm, spec.merge} <= {"NGRAM", None}:
        given.note("shared_noise", False, None, "no effect: a lookup draws nothing", WARNING)
    for name in ("ngram_min_match", "ngram_max_match"):
        value = getattr(spec, name)
        if "NGRAM" not in (spec.algorithm, spec.merge) and value != getattr(defaults, name):
            given.note(name, value, None, f"no effect: the algorithm is {spec.algorithm}", WARNING)
    for name, instead in SGLANG_ENVIRONMENT.items():
        if given.env.get(name):
            given.note(name, given.env[name], None, f"no effect: jaxspec does not read it; {instead}", WARNING)


def _refuse_changes(notes: list[Note]) -> None:
    refused = [str(note) for note in notes if note.kind in REFUSED_BY_STRICT]
    if refused:
        raise ValueError(f"strict=True refuses {len(refused)} of the plan's notes: {'; '.join(refused)}.")
