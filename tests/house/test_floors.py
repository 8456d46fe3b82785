"""A room imports only from lower floors; no module is part of an import cycle; heavy libraries load where used."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "viviane"

FLOORS = {
    "core": 0,
    **dict.fromkeys(("schema", "batch", "config"), 1),
    **dict.fromkeys(("ops", "optim"), 2),
    **dict.fromkeys(("data", "etl", "nn", "metrics"), 3),
    **dict.fromkeys(("embedding", "parallel", "store"), 4),
    "training": 5,
    **dict.fromkeys(("model", "zoo"), 6),
    **dict.fromkeys(("report", "bench", "export", "serving", "retrieval"), 7),
    **dict.fromkeys(("cli", "tensorflow", "compat"), 8),
    "__main__": 9,  # python -m viviane
    "": 9,  # viviane/__init__.py gathers the public names; nothing inside imports it
}
# (room, room of the same floor that it may import): why.
SAME_FLOOR = {
    ("schema", "config"): "a schema is a group of settings",
    ("batch", "schema"): "a batch is laid out by its schema",
    ("optim", "ops"): "dense parameters and tables follow the same rules",
    ("parallel", "embedding"): "shards of a table are tables of collections",
    ("cli", "compat"): "a command opens the door for other libraries' scripts",
    ("zoo", "model"): "a reference model adds nodes to a Model",
}
# Libraries that may load with the package; all others are imported inside functions.
LIGHT = {"torch", "numpy", "pyarrow", "pydantic"}
LIGHT_IN_ROOM = {"cli": {"typer"}}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported(node: ast.AST, module: str) -> Iterator[str]:
    """Yield the dotted names that one import statement names; modules of ours to the module, not the name in it."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: relative import in line {node.lineno}; write the full name"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else node.module


def all_imports(module: str) -> set[str]:
    tree = ast.parse(MODULES[module].read_text())
    return {name for node in ast.walk(tree) for name in imported(node, module)}


def load_time_imports(module: str) -> set[str]:
    """Return what is imported when the module loads: not in functions, not under TYPE_CHECKING."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while waiting:
        node = waiting.pop()
        found.update(imported(node, module))
        for child in ast.iter_child_nodes(node):
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not guarded and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                waiting.append(child)
    return found


def ours(names: set[str]) -> set[str]:
    return {name for name in names if name == "viviane" or name.startswith("viviane.")}


@pytest.mark.parametrize("module", MODULES)
def test_imports_come_from_lower_floors(module: str) -> None:
    here = room(module)
    assert here in FLOORS, f"the room {here!r} has no floor yet: add it to FLOORS in {__file__}"
    for name in sorted(ours(all_imports(module))):
        there = room(name)
        assert there in FLOORS, f"{module} imports {name}, whose room has no floor"
        if there == here:
            continue
        if FLOORS[there] == FLOORS[here]:
            assert (here, there) in SAME_FLOOR, (
                f"{module} imports {name}: both rooms are on floor {FLOORS[here]}. Move what they share down, or give "
                "the reason in SAME_FLOOR"
            )
        else:
            assert FLOORS[there] < FLOORS[here], (
                f"{module} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]}): imports only go down"
            )


def test_same_floor_exceptions_are_all_in_use() -> None:
    used = {(room(module), room(name)) for module in MODULES for name in ours(all_imports(module))}
    unused = set(SAME_FLOOR) - used - {pair for pair in SAME_FLOOR if pair[0] not in {room(m) for m in MODULES}}
    assert not unused, f"remove the exceptions that nothing needs any more: {unused}"


def test_no_import_cycles() -> None:
    edges = {module: ours(load_time_imports(module)) & set(MODULES) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail("import cycle: " + " -> ".join([*path[path.index(module) :], module]))
        if module not in done:
            for name in sorted(edges[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


# Modules that are loaded with the first kernel, never by `import viviane`: test_import_time.py watches that.
KERNELS = {
    ".native": {"numba", "llvmlite"},
    ".cpu": {"numba", "llvmlite"},
    ".triton_parts": {"triton"},
    ".gpu": {"triton"},
    ".rules": {"numba"},
}


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_are_imported_where_they_are_used(module: str) -> None:
    allowed = LIGHT | LIGHT_IN_ROOM.get(room(module), set()) | {"viviane"} | sys.stdlib_module_names
    allowed |= {library for part, libraries in KERNELS.items() if part in module for library in libraries}
    heavy = {name for name in load_time_imports(module) if name.split(".")[0] not in allowed}
    assert not heavy, f"{module} loads {sorted(heavy)} at import: import it inside the function that uses it"


def test_the_check_itself_sees_violations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import duckdb\nfrom viviane.cli import main\n\ndef f():\n    from viviane.training import Anything\n"
    )
    monkeypatch.setitem(MODULES, "viviane.core.bad", bad)
    assert ours(all_imports("viviane.core.bad")) == {"viviane.cli.main", "viviane.training"}
    assert load_time_imports("viviane.core.bad") == {"duckdb", "viviane.cli.main"}
    with pytest.raises(AssertionError, match="imports only go down"):
        test_imports_come_from_lower_floors("viviane.core.bad")
    with pytest.raises(AssertionError, match="duckdb"):
        test_heavy_libraries_are_imported_where_they_are_used("viviane.core.bad")
