"""Where compiled programs are kept, and pools that no memory holds."""

import jax
import pytest

from jaxspec import device
from jaxspec.device import bytes_per_token, check_pool_fits, keep_compiled_programs
from jaxspec.models import Decoder
from tests.tiny import tiny_config

MODELS = [(Decoder, tiny_config())]


@pytest.fixture(autouse=True)
def _cache_settings_are_put_back():
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_named_folder_which_is_made(tmp_path):
    folder = tmp_path / "a" / "b"
    assert keep_compiled_programs(folder) == str(folder) == jax.config.values["jax_compilation_cache_dir"]
    assert folder.is_dir()
    assert not list(folder.iterdir())
    assert keep_compiled_programs(None) is None


def test_the_automatic_folder_is_the_users_unless_jax_was_told_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_compiled_programs("auto") == str(tmp_path / "jaxspec" / "programs")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert keep_compiled_programs("auto") == str(tmp_path / "own")


@pytest.mark.parametrize("inside", ["", "/below"])
def test_a_file_in_the_place_of_the_folder_is_an_error_that_names_the_setting(tmp_path, inside):
    (tmp_path / "file").touch()
    path = f"{tmp_path}/file{inside}"
    with pytest.raises(ValueError, match=rf"compilation_cache_dir='{path}' is no folder .* set another one, or None"):
        keep_compiled_programs(path)


def refuse_to_write(*args: object, **kwargs: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(device.tempfile, "TemporaryFile", refuse_to_write)
    with pytest.raises(ValueError, match=r"compilation_cache_dir=.* \(Permission denied\)"):
        keep_compiled_programs(tmp_path)


def test_an_automatic_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device.tempfile, "TemporaryFile", refuse_to_write)
    assert keep_compiled_programs("auto") is None
    assert "set compilation_cache_dir" in caplog.text


def test_a_pool_beyond_the_memory_is_refused_with_what_it_needs(monkeypatch):
    each = bytes_per_token(MODELS, "float32", "xla")
    monkeypatch.setattr(device, "_memory_bytes", lambda: 10 * each)
    check_pool_fits(MODELS, "float32", "xla", 10)
    with pytest.raises(
        ValueError, match=r"max_total_tokens=11 needs .* GiB .* this device has .* set it to less than 10"
    ):
        check_pool_fits(MODELS, "float32", "xla", 11)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"max_total_tokens=2147483647 needs 512.0 GiB"):
        check_pool_fits(MODELS, "float32", "xla", 2**31 - 1)
    monkeypatch.setattr(device, "_memory_bytes", lambda: None)
    check_pool_fits(MODELS, "float32", "xla", 2**60)
