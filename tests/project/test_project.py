"""What the design promises about the house: who imports what, how large things are, what an import loads."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoguard

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autoguard"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Parameters of JAX's own primitives whose names or meaning differ between the supported releases.
DIALECT = {"num_consts", "num_carry", "ft_in", "ft_out"}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "core", "base"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

every_module = pytest.mark.parametrize("module", MODULES)


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(), filename=module)


def imported_names(node: ast.AST) -> Iterator[str]:
    """The dotted names a syntax node imports, also by `import_module("...")` or an attribute `jax._src`."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(source), names=names, level=0):
            yield from (f"{source}.{alias.name}" for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name
        case ast.Attribute(value=ast.Name(id=package), attr="_src"):
            yield f"{package}._src"


def imports(module: str) -> list[tuple[int, str]]:
    """Every `(line, dotted name)` that a module imports, at any depth."""
    return [(getattr(node, "lineno", 0), name) for node in ast.walk(parse(module)) for name in imported_names(node)]


def offending(module: str, packages: tuple[str, ...]) -> list[str]:
    """The places where a module imports one of `packages` or something inside them."""
    return [
        f"{module}:{line}: {name}"
        for line, name in imports(module)
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    ]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import jax._src.core", ["jax._src.core"]),
        ("from jax import _src", ["jax._src"]),
        ("def f():\n    from jax._src import core as c", ["jax._src.core"]),
        ("import jax\njax._src.core.Jaxpr", ["jax", "jax._src"]),
        ("import importlib\nimportlib.import_module('flax.nnx')", ["importlib", "flax.nnx"]),
    ],
)
def test_the_walk_sees_each_way_to_import(source: str, names: list[str]) -> None:
    found = [name for node in ast.walk(ast.parse(source)) for name in imported_names(node)]
    assert sorted(found) == sorted(names)


@every_module
def test_private_modules_are_imported_by_compat_only(module: str) -> None:
    if module != "autoguard/compat.py":
        assert offending(module, ("jax._src", "chex._src")) == []


@every_module
def test_flax_is_imported_by_nnx_only(module: str) -> None:
    if not module.startswith("autoguard/nnx/"):
        assert offending(module, ("flax",)) == []


@every_module
def test_parameters_of_one_dialect_are_read_by_compat_only(module: str) -> None:
    if module != "autoguard/compat.py":
        constants = (node for node in ast.walk(parse(module)) if isinstance(node, ast.Constant))
        found = [f"{module}:{node.lineno}: {node.value!r}" for node in constants if node.value in DIALECT]
        assert found == []


@every_module
def test_third_party_imports_are_declared(module: str) -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["nnx"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
    undeclared = [
        f"{module}:{line}: {name}"
        for line, name in imports(module)
        if name.split(".")[0] not in declared | sys.stdlib_module_names | {"autoguard"}
    ]
    assert undeclared == []


@every_module
def test_modules_are_below_300_lines(module: str) -> None:
    assert len((ROOT / module).read_text().splitlines()) < 300


@every_module
def test_functions_are_below_50_lines(module: str) -> None:
    functions = (node for node in ast.walk(parse(module)) if isinstance(node, FUNCTIONS))
    found = [f"{module}:{f.lineno}: {f.name}, {length(f)} lines" for f in functions if length(f) >= 50]
    assert found == []


@every_module
def test_no_module_is_named_for_nothing(module: str) -> None:
    assert FORBIDDEN_NAMES.isdisjoint(Path(module).with_suffix("").parts)


def test_import_loads_nothing_but_the_dependencies() -> None:
    """`import autoguard` adds itself to what its required dependencies load, and no optional package."""
    code = """
import sys, jax, jax.numpy, chex, numpy, wrapt
before = {name.partition(".")[0] for name in sys.modules}
import autoguard
print(*{name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
print(*{"flax", "optax", "pytest", "hypothesis", "rich", "sklearn"} & set(sys.modules))
"""
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["autoguard", ""]


def test_version_is_the_one_of_the_metadata() -> None:
    assert autoguard.__version__ == importlib.metadata.version("jax-autoguard") == PROJECT["version"]


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the root as from a plain shell, not as inside the `make test` that may run this."""
    hidden = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@needs_make
def test_make_help_names_every_target() -> None:
    listed = set(re.findall(r"^make (\w+)", run("make", "help").stdout, flags=re.MULTILINE))
    assert listed == {"demo", "test", "faults", "lint", "bench", "clean"}


@needs_make
def test_make_refuses_an_old_python_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\necho "3.10 old"\n')
    old.chmod(0o755)
    result = run("make", "test", f"PYTHON={old}")
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "is Python 3.10: autoguard needs CPython 3.11 or newer" in line


@needs_make
def test_make_refuses_a_python_that_does_not_run() -> None:
    result = run("make", "test", "PYTHON=no-such-python")
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert "cannot run PYTHON=no-such-python" in line


def test_ci_script_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", str(script)).returncode == 0
