"""What every test shares: one platform, full matmul precision, and the reference files beside the checkout."""

import importlib.metadata
import os
import signal
from pathlib import Path

# Before the first import of jax: the suite runs on the CPU unless the caller names another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are compiled faster by XLA's older emitters, where it still has them; see `_compiled_code_is_freed`.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import contextlib
import gc
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

jax.config.update("jax_default_matmul_precision", "highest")

# A shell without job control starts what it puts into the background deaf to Ctrl-C, and its children after it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values and evaluation prompts, `shared` beside the checkout; skips where it is absent."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the reference files: a folder named 'shared' beside the checkout")
    return folder


@contextlib.contextmanager
def _compilation_cache(folder: Path, *, is_optimised: bool) -> Iterator[None]:
    """Keeps compiled programs in a folder for a while, so that equal ones are compiled once by all processes."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        # With a limit JAX locks the folder, so that no process reads what another has half written.
        "jax_compilation_cache_max_size": 1 << 36,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.config.update("jax_disable_most_optimizations", not is_optimised)
        reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.config.update("jax_disable_most_optimizations", False)
        reset_cache()


@pytest.fixture(scope="session")
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of this run and not of one process: each has a folder of its own below.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _compiled_code_is_freed(_programs: Path, request: pytest.FixtureRequest):
    """Frees what a module compiled: a program takes hundreds of memory maps, and a process may have 65,530.

    The next module that needs an equal one finds it on disk.
    """
    # Tiny models are compiled without optimisations, in a third of the time; the real one would run at half its speed.
    with _compilation_cache(_programs, is_optimised=request.module.__name__.endswith("test_smollm2")):
        yield
    jax.clear_caches()
    gc.collect()
