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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_of_fewer_bits_are_a_request_that_the_plan_names(dtype):
    plan = plan_of("NGRAM", strict=True, cpu_kernels=CpuKernels(), engine=EngineConfig(weight_dtype=dtype))
    assert (plan.dtype, plan.weight_dtype, plan.weight_layout) == ("float32", dtype, "panels")
    assert note_of(plan, "weight_dtype").kind == "requested"


def test_weights_are_stored_as_they_are_computed_with_unless_told_otherwise():
    for dtype in ("float32", "bfloat16"):
        for asked in ("auto", dtype):
            plan = plan_of(cpu_kernels=CpuKernels(), engine=EngineConfig(dtype=dtype, weight_dtype=asked))
            assert plan.weight_dtype == dtype
            assert not notes_of(plan, "weight_dtype")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"cpu_kernels": None}, "this is no CPU"),
        ({"cpu_kernels": CpuKernels(), "env": OFF}, "JAXSPEC_CPU_KERNELS=0"),
        ({"cpu_kernels": CpuKernels("it has no vectors")}, "it has no vectors"),
        ({"cpu_kernels": CpuKernels(), "attention_backend": "xla"}, "set it to 'auto'"),
        ({"cpu_kernels": CpuKernels(), "dtype": "bfloat16"}, "dtype is bfloat16"),
    ],
    ids=str,
)
def test_weights_of_fewer_bits_are_refused_where_the_kernels_do_not_run(where, reason):
    settings = {name: where.pop(name) for name in ("attention_backend", "dtype") if name in where}
    error = refusal(engine=EngineConfig(weight_dtype="int8", **settings), **where)
    assert "weight_dtype='int8' needs the CPU's kernels" in error
    assert reason in error


@pytest.mark.parametrize("cpu_kernels", [None, CpuKernels()])
def test_a_switch_that_is_neither_yes_nor_no_is_an_error(cpu_kernels):
    assert "JAXSPEC_CPU_KERNELS='maybe'" in refusal(cpu_kernels=cpu_kernels, env={"JAXSPEC_CPU_KERNELS": "maybe"})
