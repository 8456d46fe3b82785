"""Files and functions stay short enough to read; every public name says what it is."""

import ast
import importlib
import inspect
import pkgutil
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


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_lengths(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{relative(path)} has {text.count(chr(10))} lines: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"


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
