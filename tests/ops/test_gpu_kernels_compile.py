"""Compile the GPU's kernels on machines without one, as their tests launch them in the interpreter.

The interpreter takes what the compiler refuses: a name that changes its type within a branch, a shape that is no power
of two, more shared memory than there is. Nor does it tell how many numbers a thread loads at once.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.ops.interpreted import ROOT, SHARES

SOURCES = ROOT / "src"
PROCESSES = 2

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/ops/gpu compiles for it"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.timeout(900),  # it may be the first to ask for the interpreter's tests
]


@pytest.mark.parametrize("part", range(PROCESSES))
@pytest.mark.parametrize("stage", ["types", pytest.param("code", marks=pytest.mark.slow)])
def test_kernels_compile(stage, part, interpreted, tmp_path):
    # From both ends, so that parts in two processes do not wait for the same share.
    shares = [interpreted(number) for number in range(len(SHARES))[:: 1 if part == 0 else -1]]
    report = compile_launches(stage, tmp_path, part, PROCESSES, [share.launches for share in shares])
    if "reason" in report:
        pytest.skip(report["reason"])
    assert report["compiled"], "the interpreter's tests noted no launch"
    assert not report["faults"], "\n\n".join(report["faults"])


def test_faults_are_told(tmp_path):
    launches, tiles = tmp_path / "launches.jsonl", {"tiles": "float32", "block": [256, 256]}
    faulty = [
        {"kernel": "changes_a_type_kernel", "given": {"out": {"pointer": "int64", "aligned": True}, "size": 17}},
        {"kernel": "takes_too_much_kernel", "given": {"source": tiles, "target": tiles}, "options": {"num_warps": 32}},
        {
            "kernel": "loads_one_by_one_kernel",
            "given": {"table": {"pointer": "int64", "aligned": True}, "wide": True, "block": 1024},
        },
    ]
    named = [{"options": {}} | one | {"kernel": f"tests.ops.gpu.faults.{one['kernel']}"} for one in faulty]
    launches.write_text("\n".join(map(json.dumps, named)))
    report = compile_launches("code", tmp_path, 0, 1, [launches])
    if "reason" in report:
        pytest.skip(report["reason"])
    by_type, by_load, by_size = sorted(report["faults"])
    assert "faults.changes_a_type_kernel does not compile for sm_90" in by_type
    assert "out=*int64, size=17" in by_type
    assert "`n` is of type int64" in by_type
    assert "redefines it as int32" in by_type
    assert "faults.loads_one_by_one_kernel" in by_load
    assert "one number at a time" in by_load
    assert "faults.takes_too_much_kernel" in by_size
    assert "bytes of shared memory, 232448 at most" in by_size


def compile_launches(stage: str, folder: Path, first: int, step: int, files: list[Path]) -> dict:
    """Compile in a process of its own, where no kernel was given to the interpreter."""
    log = folder / "compiler.log"
    words = ["-W", "ignore", "-m", "tests.ops.gpu.compiling", stage, log, first, step, *files]
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    found = log.read_text() if log.exists() else ""
    assert done.returncode == 0, f"the compiler's process ended with {done.returncode}\n{found}{done.stderr}"
    return json.loads(done.stdout)


def test_every_kernel_is_launched(interpreted):
    files = [interpreted(number).launches for number in range(len(SHARES))]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    launched, kernels = {json.loads(line)["kernel"] for line in lines}, find_kernels()
    missing = sorted(kernels - launched)
    assert not missing, f"no test in tests/ops/gpu launches {', '.join(missing)}: nothing shows that they compile"
    assert launched == kernels, "find_kernels overlooks some"


def find_kernels() -> set[str]:
    """Return the package's Triton functions but for those that others call and nobody launches."""
    trees = {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): ast.parse(path.read_text())
        for path in SOURCES.rglob("*.py")
        if "gpu" in path.read_text() or "triton" in path.read_text()
    }
    functions, called, launched = {}, set(), set()
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                functions[f"{module}.{node.name}"] = node
    for module, tree in trees.items():
        full = {one.rpartition(".")[2]: one for one in functions if one.rpartition(".")[0] == module}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                full |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(full.get(ast.unparse(node.func.value)))
        for name, function in functions.items():
            if name.rpartition(".")[0] == module:
                called |= {full.get(node.id) for node in ast.walk(function) if isinstance(node, ast.Name)} - {name}
    return (functions.keys() - called) | (functions.keys() & launched)
