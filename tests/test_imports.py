"""What may know what: which side a file is on is read off its imports, so that new files need no list.

`test_layout` names the host and the device files; here are the rules that hold for any file.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxspec"
FILES = sorted(PACKAGE.rglob("*.py"))
ARRAYS = ("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore")
# The engine and what launches it see both sides, and loading reads files into arrays for them.
BOTH_SIDES = ("engine", "launch", "loading", "training")
# Text of machine code, and what is known of the host, are plain Python.
MACHINE = [
    "attention",
    "call_frame",
    "exponential",
    "host",
    "job",
    "microkernel",
    "product",
    "softmax",
    "storage",
    "tile",
    "words",
]
PLAIN = (
    "models.config",
    "models.own_draft",
    "models.parts",
    "models.tensor_names",
    "draft.shape",
    *(f"cpu.{name}" for name in MACHINE),
)
MAY_LOAD = ("engine", "launch", "llm", "loading", "tokenizer", "training")

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
# Where names become methods; everywhere else a method is an object with properties.
MAY_NAME = ("config", "resolve", "draft_choice", "cli", "draft.__init__")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


MODULES = {module_of(file): file for file in FILES}


def resolve_name(dotted: str) -> str | None:
    """Returns the module of this package that an import names, None for other packages."""
    inside = dotted.removeprefix("jaxspec.") if dotted.startswith("jaxspec.") else None
    while inside:
        for module in (inside, f"{inside}.__init__"):
            if module in MODULES:
                return module
        inside = inside.rpartition(".")[0]
    return None


def inner_modules(module: str) -> set[str]:
    """Returns the modules of this package that a module imports."""
    return {name for name in map(resolve_name, imports_of(tree_of(MODULES[module]))) if name}


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_of(node: ast.AST) -> set[str]:
    """Returns what runs as an import below a node, in functions too; blocks for the type checker do not run."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found.update(alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            found.update(f"{child.module}.{alias.name}" for alias in child.names)
        elif not only_for_types(child):
            found |= imports_of(child)
    return found


def sides() -> dict[str, str]:
    """Returns "device" for the modules that import arrays, themselves or through other device modules, else "host"."""
    imported = {module: imports_of(tree_of(file)) for module, file in MODULES.items()}
    arrays = {module for module, names in imported.items() if {name.split(".")[0] for name in names} & {*ARRAYS}}
    device = {module for module in arrays if not module.startswith(BOTH_SIDES)}
    inside = {module: {resolve_name(name) for name in names} for module, names in imported.items()}
    while True:
        more = {m for m, names in inside.items() if names & device and not m.startswith(BOTH_SIDES)} - device
        if not more:
            return {module: "device" if module in device else "host" for module in MODULES}
        device |= more


SIDES = sides()


@pytest.mark.parametrize("module", MODULES)
def test_only_the_engine_sees_both_sides(module):
    if SIDES[module] == "host" or module.startswith(BOTH_SIDES):
        return
    host = {name for name in inner_modules(module) if SIDES[name] == "host" and not name.endswith("__init__")}
    assert not host - {*PLAIN}, f"{module} imports arrays, and host files beside them"


@pytest.mark.parametrize(
    "name", ["config", "resolve", "llm", "tokenizer", "request", "scheduler", "pages", "metrics", "text", "cli"]
)
def test_host_files_are_free_of_arrays(name):
    if name in MODULES:
        assert SIDES[name] == "host"


@pytest.mark.parametrize("module", MODULES)
def test_loading_is_imported_by_few(module):
    if any(name.startswith("loading") for name in inner_modules(module)):
        assert module.startswith(MAY_LOAD)


def test_the_model_config_is_plain():
    if "models.config" in MODULES:
        assert SIDES["models.config"] == "host"
        plain = {f"models.{name}" for name in ("families", "fields", "own_draft", "parts", "rope_config")}
        assert inner_modules("models.config") <= plain
        assert all(SIDES[name] == "host" and inner_modules(name) <= plain for name in plain)
        assert not inner_modules("models.fields")


def algorithm_tests(tree: ast.AST) -> list[str]:
    """Returns the places where code asks which algorithm it is: comparisons, patterns, prefixes, `is_...` names."""
    found = []
    is_name = re.compile(rf"^_?is_({'|'.join(ALGORITHMS)})\d*$", re.IGNORECASE)
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = list(node.args) if node.func.attr in ("startswith", "endswith", "removeprefix") else []
        constants = [c.value for part in asked for c in ast.walk(part) if isinstance(c, ast.Constant)]
        line = getattr(node, "lineno", 0)
        found += [f"line {line}: {value}" for value in constants if str(value).upper() in ALGORITHMS]
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if isinstance(name, str) and is_name.match(name):
            found.append(f"line {line}: {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_code_asks_which_algorithm_it_is(module):
    if module not in MAY_NAME:
        assert not algorithm_tests(tree_of(MODULES[module]))


@pytest.mark.parametrize(
    "code",
    [
        "if plan.algorithm == 'EAGLE3': pass",
        "if plan.algorithm in ('NGRAM', 'x'): pass",
        "if 'eagle' != name: pass",
        "match name:\n    case 'NEXTN': pass",
        "name.startswith('EAGLE')",
        "def is_eagle(self): pass",
        "if method.is_eagle3(): pass",
    ],
)
def test_questions_about_the_algorithm_are_found(code):
    assert algorithm_tests(ast.parse(code))


@pytest.mark.parametrize("code", ["METHODS = {'NGRAM': Ngram}", "if plan.num_steps > 1: pass", "is_last = True"])
def test_tables_and_other_questions_are_not(code):
    assert not algorithm_tests(ast.parse(code))
