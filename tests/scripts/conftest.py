"""A tiny model, and engine flags under which it compiles quickly."""

from pathlib import Path

import pytest

from tests.scripts.tiny_model import write_tiny_model

# One length of prefill chunk; no cache on disk, so that a test reads nothing of an earlier run.
SMALL_ENGINE = ("--context-length", "256", "--prefill-chunk-buckets", "64", "--chunked-prefill-size", "64")
NO_CACHE = ("--compilation-cache-dir", "none")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def small(tiny_model: Path) -> list[str]:
    """The flags that name the tiny model and keep its engine small."""
    return ["--model", str(tiny_model), *SMALL_ENGINE, *NO_CACHE]
