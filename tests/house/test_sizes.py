"""Files and functions stay short enough to read; every public name says what it is."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import viviane

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
PACKAGES = ["viviane", *(f"viviane.{info.name}" for info in pkgutil.iter_modules(viviane.__path__))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def too_long(path: Path) -> Iterator[str]:
    """Yield what is too long in a file."""
    text = path.read_text()
    if (lines := text.count("\n")) > MAX_FILE_LINES:
        yield f"{path} has {lines} lines: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno} {node.name} has {length} lines"


def test_lengths() -> None:
    """One test for all files: a test for each would take longer than what it checks."""
    found = [error for path in SOURCES for error in too_long(path)]
    assert not found, "\n".join(found)


def test_the_check_of_lengths_sees_long_files_and_functions(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1))
    assert not list(too_long(file))
    file.write_text("class A:\n  async def f(self):\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    assert list(too_long(file)) == [f"{file}:2 f has {MAX_FUNCTION_LINES + 1} lines"]
    file.write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert list(too_long(file)) == [f"{file} has {MAX_FILE_LINES + 1} lines: split it"]


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "util.py", "helper.py", "misc.py", "common.py"])
def test_files_are_named_after_what_one_would_look_for(name: str) -> None:
    assert not [relative(path) for path in SOURCES if path.name == name]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__, f"{package} has no docstring"
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            # A class without one of its own would show its base's.
            text = (value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
            assert text.strip(), f"{package}.{name} has no docstring"
            assert text.strip().splitlines()[0].rstrip().endswith((".", ":", "?")), (
                f"{package}.{name}: end the first line"
            )
