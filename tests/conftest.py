"""What every test shares: one platform, full matmul precision, and the reference files beside the checkout."""

import os
from pathlib import Path

# Before the first import of jax: the suite runs on the CPU unless the caller names another platform.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gc

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference values and evaluation prompts, `shared` beside the checkout; skips where it is absent."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the reference files: a folder named 'shared' beside the checkout")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _compiled_code_is_freed():
    """Frees what a module compiled: a program takes hundreds of memory maps, and a process may have 65,530."""
    yield
    jax.clear_caches()
    gc.collect()
