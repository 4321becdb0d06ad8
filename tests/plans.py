"""Builders of plans for the tests of resolving."""

import pytest

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.plan import DraftInfo, Note, SpecPlan, TargetInfo
from jaxspec.resolve import resolve
from jaxspec.weight_layout import CpuKernels

ALL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
V1 = EngineConfig(disable_overlap_schedule=True)
V2_OFF = {"JAXSPEC_ENABLE_SPEC_V2": "0"}


def target_info(**changes) -> TargetInfo:
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_layers": 2,
        "max_position": 4096,
        "tokenizer_hash": "target",
    }
    return TargetInfo(**{**values, **changes})


def draft_info(**changes) -> DraftInfo:
    values = {"architecture": "LlamaForCausalLM", "vocab_size": 1000, "max_position": 4096, "tokenizer_hash": "target"}
    return DraftInfo(**{**values, **changes})


def plan_of(
    algorithm: str | None = None,
    *,
    target: TargetInfo | None = None,
    draft: DraftInfo | None = None,
    merge_draft: DraftInfo | None = None,
    engine: EngineConfig | None = None,
    env: dict[str, str] | None = None,
    platform: str = "cpu",
    available=ALL,
    page_size_default: int = 16,
    max_total_tokens_default: int = 65536,
    scan_layers_default: bool = False,
    cpu_kernels: CpuKernels | None = None,
    compilation_cache_dir: str | None = "cache",
    **spec,
) -> SpecPlan:
    """Resolves with a draft model for the algorithms that need one."""
    if algorithm in ("EAGLE", "EAGLE3", "STANDALONE"):
        spec.setdefault("draft_model", "draft")
    has_draft = spec.get("draft_model") is not None
    return resolve(
        None if algorithm is None else SpecConfig(algorithm=algorithm, **spec),
        engine or EngineConfig(),
        target or target_info(),
        (draft or draft_info()) if has_draft else None,
        env or {},
        available=available,
        merge_draft=merge_draft,
        platform=platform,
        page_size_default=page_size_default,
        max_total_tokens_default=max_total_tokens_default,
        scan_layers_default=scan_layers_default,
        cpu_kernels=cpu_kernels,
        compilation_cache_dir=compilation_cache_dir,
    )


def shape_of(plan: SpecPlan) -> tuple[int, int, int]:
    return plan.num_steps, plan.eagle_topk, plan.num_draft_tokens


def notes_of(plan: SpecPlan, *fields: str) -> list[Note]:
    return [note for note in plan.notes if note.field in fields]


def note_of(plan: SpecPlan, field: str) -> Note:
    (note,) = notes_of(plan, field)
    return note


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        plan_of(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)
