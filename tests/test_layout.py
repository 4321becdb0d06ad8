"""Imports follow one direction: host files know no jax, device files no host file; only the engine sees both."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent

DEVICE_FILES = {
    "adjust",
    "attention",
    "context",
    "device",
    "kv_cache",
    "rules",
    "runner",
    "sampling",
    "simulation",
    "state",
    "step",
    "tree",
    "verify",
}
DEVICE_FOLDERS = {"cpu", "draft", "models", "pallas"}
# Sees both sides, or reads files into arrays.
FREE = {"__init__", "engine", "launch", "loading", "training"}
# Plain Python inside a device folder: what a model is, which host files need to know too.
SHARED = {"jaxspec.models.config", "jaxspec.models.fields"}
ARRAY_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorstore"}


def _modules() -> dict[str, Path]:
    """Module names below the package, as `llm` or `models.config`, and their files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in files}


def _imports(file: Path) -> set[str]:
    """Every module that a file imports when it runs, also inside functions; `if TYPE_CHECKING` blocks do not run."""
    found: set[str] = set()
    for node in _running_nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _running_nodes(node: ast.AST):
    yield node
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _running_nodes(child)


def _is_device(module: str) -> bool:
    """Whether a module, named below the package, runs on the device side."""
    top = module.split(".")[0]
    return top in DEVICE_FOLDERS or top in DEVICE_FILES


def _inside(module: str) -> str | None:
    """The name below the package of an imported module, None for other packages and for the package itself."""
    return module.removeprefix("jaxspec.") if module.startswith("jaxspec.") else None


MODULES = _modules()
HOST = [name for name in MODULES if not _is_device(name) and name.split(".")[0] not in FREE]
DEVICE = [name for name in MODULES if _is_device(name)]


@pytest.mark.parametrize("name", HOST)
def test_host_files_import_no_arrays_and_no_device_file(name):
    imported = _imports(MODULES[name])
    assert not {module for module in imported if module.split(".")[0] in ARRAY_PACKAGES}
    device = {module for module in imported if (inside := _inside(module)) is not None and _is_device(inside)}
    allowed = {module for module in device if any(module == s or module.startswith(f"{s}.") for s in SHARED)}
    assert not device - allowed - {"jaxspec.models"}


@pytest.mark.parametrize("name", DEVICE)
def test_device_files_import_no_host_file(name):
    inside = {found for module in _imports(MODULES[name]) if (found := _inside(module)) is not None}
    # `from jaxspec.x import y` is listed as x and x.y, and y may be a name: judge by the first part that is a module.
    assert not {module for module in inside if module.split(".")[0] in {host.split(".")[0] for host in HOST}}


@pytest.mark.parametrize("module", ["jaxspec", "jaxspec.config", "jaxspec.resolve"])
def test_settings_import_without_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_resolve_and_unknown_ones_do_not():
    for name in jaxspec.__all__:
        assert getattr(jaxspec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        getattr(jaxspec, "Nonsense")  # noqa: B009  (a type checker knows that it is not there)
