"""Which kernels run: the automatic ones where they can serve, and named ones or an error."""

import jax.numpy as jnp
import pytest

from jaxspec.attention_choice import TPU_TILES
from jaxspec.config import EngineConfig
from jaxspec.pallas.commit_tpu import tile_len
from jaxspec.weight_layout import CpuKernels
from tests.plans import note_of, notes_of, plan_of, refusal


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "xla"), ("gpu:8.0", "xla"), ("tpu", "pallas_tpu")])
def test_every_platform_has_an_automatic_choice(platform, backend):
    plan = plan_of(platform=platform)
    note = note_of(plan, "attention_backend")
    assert plan.attention_backend == backend
    assert (note.before, note.after, note.kind) == ("auto", backend, "auto")
    assert "set attention_backend" in note.reason


def test_the_cpus_kernels_attend_where_they_multiply():
    assert plan_of(platform="cpu", cpu_kernels=CpuKernels()).attention_backend == "cpu"
    for engine in (EngineConfig(attention_backend="cpu"), EngineConfig(attention_backend="cpu", dtype="bfloat16")):
        text = refusal(platform="cpu", cpu_kernels=None if engine.dtype == "auto" else CpuKernels(), engine=engine)
        assert "attention_backend='cpu' cannot run" in text


# What is in the way, and what the user is told to set.
OBSTACLES = [
    ({"dtype": "float16"}, ["dtype='float16'", "float32, bfloat16"]),
    ({"dtype": "bfloat16", "page_size": 40}, ["page_size=40", "multiple of 16", "page_size=32"]),
    ({"page_size": 4}, ["page_size=4", "multiple of 8", "page_size=8"]),
    ({"page_size": 8, "max_running_requests": 400, "max_model_len": 4096}, ["204800 pages", "196608", "page_size"]),
]


@pytest.mark.parametrize(("settings", "says"), OBSTACLES)
def test_what_the_kernels_cannot_serve_falls_back_with_the_reason(settings, says):
    plan = plan_of(platform="tpu", engine=EngineConfig(**settings))
    note = note_of(plan, "attention_backend")
    assert (plan.attention_backend, note.kind) == ("xla", "fallback")
    assert all(part in note.reason for part in says)
    assert all(part in refusal("NGRAM", platform="tpu", engine=EngineConfig(**settings), strict=True) for part in says)


@pytest.mark.parametrize(("settings", "says"), OBSTACLES)
def test_named_kernels_never_fall_back(settings, says):
    engine = EngineConfig(attention_backend="pallas_tpu", **settings)
    text = refusal(platform="tpu", engine=engine)
    assert all(part in text for part in ("attention_backend='pallas_tpu' cannot run", *says))


@pytest.mark.parametrize(
    ("backend", "platform", "device"),
    [
        ("pallas_tpu", "cpu", "a CPU"),
        ("pallas_gpu", "cpu", "a CPU"),
        ("pallas_gpu", "tpu", "a TPU"),
        ("pallas_gpu", "gpu:8.0", "a GPU of compute capability 8.0"),
        ("pallas_gpu", "gpu:10.0", "a GPU of compute capability 10.0"),
    ],
)
def test_named_kernels_of_another_platform_are_refused(backend, platform, device):
    text = refusal(platform=platform, engine=EngineConfig(attention_backend=backend))
    assert f"attention_backend={backend!r} cannot run" in text
    assert f"this is {device}; set attention_backend='xla'" in text


def test_the_kernel_for_gpus_runs_where_it_is_named():
    """It is not the automatic choice before it is measured, and the plan says so."""
    engine = EngineConfig(attention_backend="pallas_gpu", dtype="bfloat16", page_size=128)
    assert plan_of(platform="gpu:9.0", engine=engine).attention_backend == "pallas_gpu"
    automatic = plan_of(platform="gpu:9.0", engine=EngineConfig(dtype="bfloat16", page_size=128))
    assert automatic.attention_backend == "xla"
    assert "set attention_backend='pallas_gpu'" in note_of(automatic, "attention_backend").reason
    for settings, says in (({"dtype": "float32"}, "bfloat16, float16"), ({"page_size": 16}, "set page_size=64")):
        named = EngineConfig(**{"attention_backend": "pallas_gpu", "dtype": "bfloat16", **settings})
        assert says in refusal(platform="gpu:9.0", engine=named)


def test_a_named_backend_that_can_serve_has_no_note():
    for backend in ("xla", "pallas_tpu"):
        plan = plan_of(platform="tpu", engine=EngineConfig(attention_backend=backend))
        assert plan.attention_backend == backend
        assert not notes_of(plan, "attention_backend")


@pytest.mark.parametrize("dtype", TPU_TILES)
def test_the_plan_and_the_kernels_agree_on_tiles(dtype):
    assert TPU_TILES[dtype] == tile_len(jnp.dtype(dtype))
