"""Which product the plan names, and why."""

import pytest

from jaxspec.config import EngineConfig
from jaxspec.weight_layout import CpuKernels
from tests.plans import note_of, notes_of, plan_of, refusal

OFF = {"JAXSPEC_CPU_KERNELS": "0"}


def test_accelerators_keep_plain_arrays_and_say_nothing():
    for env in ({}, OFF):
        plan = plan_of(env=env)
        assert (plan.weight_layout, plan.attention_backend) == ("plain", "xla")
        assert not notes_of(plan, "weight_layout")


def test_the_cpu_has_panels_unless_the_environment_says_no():
    plan = plan_of(cpu_kernels=CpuKernels())
    assert (plan.weight_layout, plan.attention_backend) == ("panels", "cpu")
    assert "JAXSPEC_CPU_KERNELS=0" in note_of(plan, "weight_layout").reason
    plan = plan_of(cpu_kernels=CpuKernels(), env=OFF)
    assert (plan.weight_layout, note_of(plan, "weight_layout").kind) == ("plain", "requested")


def test_a_host_that_cannot_is_a_fallback_that_strict_refuses():
    plan = plan_of(cpu_kernels=CpuKernels("it has no vectors"))
    assert (plan.weight_layout, note_of(plan, "weight_layout").kind) == ("plain", "fallback")
    assert "it has no vectors" in refusal("NGRAM", strict=True, cpu_kernels=CpuKernels("it has no vectors"))
    assert plan_of("NGRAM", strict=True, cpu_kernels=CpuKernels("it has no vectors"), env=OFF).weight_layout == "plain"


def test_attention_by_xla_leaves_products_to_xla_too():
    plan = plan_of(cpu_kernels=CpuKernels(), engine=EngineConfig(attention_backend="xla"))
    assert (plan.weight_layout, plan.attention_backend) == ("plain", "xla")
    assert note_of(plan, "weight_layout").kind == "requested"


def test_other_dtypes_are_multiplied_by_xla():
    plan = plan_of(cpu_kernels=CpuKernels(), engine=EngineConfig(dtype="bfloat16"))
    assert plan.weight_layout == "plain"
    assert "dtype is bfloat16" in note_of(plan, "weight_layout").reason


@pytest.mark.parametrize("cpu_kernels", [None, CpuKernels()])
def test_a_switch_that_is_neither_yes_nor_no_is_an_error(cpu_kernels):
    assert "JAXSPEC_CPU_KERNELS='maybe'" in refusal(cpu_kernels=cpu_kernels, env={"JAXSPEC_CPU_KERNELS": "maybe"})
