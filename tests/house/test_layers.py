"""Packages import from lower layers only; there are no import cycles; heavy libraries are imported where used."""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2] / "src" / "viviane"

LAYERS = {
    "core": 0,
    **dict.fromkeys(("schema", "batch", "config"), 1),
    **dict.fromkeys(("ops", "optim"), 2),
    **dict.fromkeys(("data", "etl", "nn", "metrics"), 3),
    **dict.fromkeys(("embedding", "parallel", "store"), 4),
    "training": 5,
    **dict.fromkeys(("model", "zoo"), 6),
    **dict.fromkeys(("report", "bench", "export", "serving", "retrieval"), 7),
    **dict.fromkeys(("cli", "keras", "tensorflow", "compat", "sklearn"), 8),
    "__main__": 9,  # python -m viviane
    "": 9,  # viviane/__init__.py defines the public names; no module of the package imports it
}
# (package, package of the same layer that it may import): why.
SAME_LAYER = {
    ("schema", "config"): "a schema is a group of settings",
    ("batch", "schema"): "the layout of a batch follows its schema",
    ("optim", "ops"): "dense parameters and tables follow the same rules",
    ("parallel", "embedding"): "shards of a table are tables of collections",
    ("embedding", "store"): "rows that do not fit into a collection's memory are in tiers",
    ("cli", "compat"): "a command runs scripts written for other libraries",
    ("cli", "tensorflow"): "a command runs scripts written for the Sparse Operation Kit",
    ("zoo", "model"): "a reference model adds nodes to a Model",
}
# Libraries that may load with the package; all others are imported inside functions.
LIGHT = {"torch", "numpy", "pyarrow", "pydantic"}
LIGHT_IN_PACKAGE = {"cli": {"typer"}, "sklearn": {"sklearn"}, "keras": {"keras"}}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported(node: ast.AST, module: str) -> Iterator[str]:
    """Yield what an import statement imports: modules of this project by module, others by their dotted name."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module}: relative import in line {node.lineno}; write the full name"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else node.module


class Contents(NamedTuple):
    """What the tests below ask of a module, from one walk through its tree: a walk through all of them takes seconds.

    Attributes:
        imports: what it imports, anywhere.
        defined: the names that it defines, and the attributes that its classes and their instances get.
        private: private names that it imports, or reads from objects, and does not define itself; each with
            `self`, `cls`, the first name of another object's expression and a dot, or "" for imports.
    """

    imports: set[str]
    defined: set[str]
    private: set[tuple[str, str]]


def contents_of(tree: ast.AST, module: str) -> Contents:
    nodes = list(ast.walk(tree))
    defined, private = defined_names(nodes), set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "viviane":
            private.update((alias.name, "") for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined:
            owner = ast.unparse(node.value)
            private.add((node.attr, owner if is_self(node.value) else owner.split(".")[0] + "."))
    return Contents({name for node in nodes for name in imported(node, module)}, defined, private)


@cache
def contents(module: str) -> Contents:
    return contents_of(ast.parse(MODULES[module].read_text()), module)


def all_imports(module: str) -> set[str]:
    return contents(module).imports


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


def layer_errors(module: str) -> Iterator[str]:
    """Yield what is wrong with the layers that a module imports from."""
    here = package(module)
    if here not in LAYERS:
        yield f"the package {here!r} of {module} has no layer yet: add it to LAYERS in {__file__}"
        return
    for name in sorted(ours(all_imports(module))):
        there = package(name)
        if there not in LAYERS:
            yield f"{module} imports {name}, whose package has no layer"
        elif there == here:
            continue
        elif LAYERS[there] == LAYERS[here] and (here, there) not in SAME_LAYER:
            yield (
                f"{module} imports {name}: both packages are in layer {LAYERS[here]}. Move what they share to a lower "
                "layer, or give the reason in SAME_LAYER"
            )
        elif LAYERS[there] > LAYERS[here]:
            yield (
                f"{module} (layer {LAYERS[here]}) imports {name} (layer {LAYERS[there]}): import from lower layers only"
            )


# One test looks at all modules, here and below: a test for each would take longer than what it checks.
def test_imports_come_from_lower_layers() -> None:
    found = [error for module in MODULES for error in layer_errors(module)]
    assert not found, "\n".join(found)


def test_same_layer_exceptions_are_all_in_use() -> None:
    used = {(package(module), package(name)) for module in MODULES for name in ours(all_imports(module))}
    unused = set(SAME_LAYER) - used - {pair for pair in SAME_LAYER if pair[0] not in {package(m) for m in MODULES}}
    assert not unused, f"remove the exceptions that are no longer needed: {unused}"


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in sorted(edges[module]):
            if name not in index:
                visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], index[name])
        if low[module] == index[module]:
            component = set(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(component)

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_no_import_cycles() -> None:
    """Every import counts: those inside functions and under TYPE_CHECKING too."""
    found = cycles({module: (ours(all_imports(module)) & set(MODULES)) - {module} for module in MODULES})
    assert not found, f"import cycles of {[sorted(cycle) for cycle in found]}: move what they share to a lower module"


def test_the_cycle_search_finds_cycles() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert sorted(map(sorted, cycles(edges))) == [["b", "c"], ["e", "f"]]


# Private names of objects of other libraries that have no public equivalent; those of a library itself, such as
# torch._foreach_add_, are recognized by the name that they begin with.
LIBRARIES = {"torch", "ctypes", "os"}
FOREIGN_PRIVATE = {
    "_dynamo_marked_constant": "torch: marks a function whose result torch.compile may keep",
    "_modules": "torch.nn.Module", "_parameters": "torch.nn.Module", "_buffers": "torch.nn.Module",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_compiled_call_impl": "torch.nn.Module: what Module.compile made",
    "_version": "torch.Tensor: counts writes in place",
    "_op": "torch._ops.OpOverload: its call, without a frame of Python", "_schema": "torch._ops.OpOverload",
    "_backward_hooks": "torch.Tensor", "_post_accumulate_grad_hooks": "torch.Tensor",
    "_forward_hooks": "torch.nn.Module", "_forward_pre_hooks": "torch.nn.Module",
    "_optimizer_step_pre_hooks": "torch.optim.Optimizer", "_optimizer_step_post_hooks": "torch.optim.Optimizer",
    "_timeout": "torch: NCCL options have no public timeout",
    "_PARTITION_EOF": "confluent_kafka.KafkaError",
    "_replace": "NamedTuple", "_asdict": "NamedTuple",
    "_learning_rate": "keras.optimizers.Optimizer: the rate's variable, or its schedule",
    "_flatten_layers": "keras.layers.Layer: the layers inside of a layer",
    "_inbound_nodes": "keras.layers.Layer: how often it was called",
    "_clear_losses": "keras.layers.Layer: drops what add_loss has kept",
    "_loss_tracker": "keras.Model: the mean loss that fit shows",
    "_compile_loss": "keras.Model: the losses of the last compile", "_compile_metrics": "keras.Model: its metrics",
    "_get_control_flow_context": "tf.Graph: whether XLA compiles it",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that a module defines, and the attributes that its classes and their instances get."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_accesses(module: Contents, inherited: set[str]) -> Iterator[str]:
    """Yield private names that a module imports, or reads from objects, and does not define itself.

    Args:
        module: the module.
        inherited: what the modules of its package define: a subclass may use that of its base class, as `self._name`.
    """
    for name, owner in sorted(module.private):
        is_library = owner.removesuffix(".") in (*LIBRARIES, "super()")
        if not is_library and not (owner in ("self", "cls") and name in inherited):
            yield name


def test_no_module_uses_private_names_of_another() -> None:
    by_package: dict[str, set[str]] = {}
    for module in MODULES:
        by_package.setdefault(package(module), set()).update(contents(module).defined)
    found = {(m, name) for m in MODULES for name in private_accesses(contents(m), by_package[package(m)])}
    found = {(module, name) for module, name in found if name not in FOREIGN_PRIVATE}
    assert not found, f"make these names public, or use what is public: {sorted(found)}"


def test_the_search_for_private_names_finds_them() -> None:
    """Reading `self._far` does not define it; only base classes of the same package may."""
    code = """
from viviane.core import _imported
class B(Base):
  def f(self, o):
    self._own = o._own + o._other + super()._base + self._near + self._far + o._near + __name__
"""
    base = ast.parse("class Base:\n  def _near(self): pass")
    found = private_accesses(contents_of(ast.parse(code), "b"), defined_names(ast.walk(base)))
    assert sorted(found) == ["_far", "_imported", "_near", "_other"]


# Modules that are loaded with the first kernel, never by `import viviane`: test_import_time.py watches that.
KERNELS = {
    ".native": {"numba", "llvmlite"},
    ".cpu": {"numba", "llvmlite"},
    ".triton_parts": {"triton"},
    ".gpu": {"triton"},
    ".rules": {"numba"},
}


def heavy_imports(module: str) -> set[str]:
    """Return the libraries that a module may not load when it is imported, and loads."""
    allowed = LIGHT | LIGHT_IN_PACKAGE.get(package(module), set()) | {"viviane"} | sys.stdlib_module_names
    allowed |= {library for part, libraries in KERNELS.items() if part in module for library in libraries}
    return {name for name in load_time_imports(module) if name.split(".")[0] not in allowed}


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    found = [f"{module} loads {sorted(heavy)}" for module in MODULES if (heavy := heavy_imports(module))]
    assert not found, "import these inside the functions that use them:\n" + "\n".join(found)


def test_the_check_itself_sees_violations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import duckdb\nfrom viviane.cli import main\n\ndef f():\n    from viviane.training import Anything\n"
    )
    monkeypatch.setitem(MODULES, "viviane.core.bad", bad)
    assert ours(all_imports("viviane.core.bad")) == {"viviane.cli.main", "viviane.training"}
    assert load_time_imports("viviane.core.bad") == {"duckdb", "viviane.cli.main"}
    assert ["lower layers only" in error for error in layer_errors("viviane.core.bad")] == [True, True]
    assert heavy_imports("viviane.core.bad") == {"duckdb"}


def test_the_check_of_layers_sees_packages_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = tmp_path / "new.py"
    new.write_text("from viviane import zoo\n")
    monkeypatch.setitem(MODULES, "viviane.fresh.new", new)
    assert list(layer_errors("viviane.fresh.new")) == [
        f"the package 'fresh' of viviane.fresh.new has no layer yet: add it to LAYERS in {__file__}"
    ]
    monkeypatch.setitem(MODULES, "viviane.data.second", new)
    new.write_text("from viviane.nn import Linear\n")
    assert ["both packages are in layer 3" in error for error in layer_errors("viviane.data.second")] == [True]
