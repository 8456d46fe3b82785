"""Machine code on disk, which several processes of a run compile and read at the same time."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODULE = """
from viviane.ops.native.kernels import kernel

def variant(number):
    def run(call):
        call[0] = call[2] * number
    return kernel(run)
"""
PROGRAM = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from variants import variant
for number in map(int, sys.argv[2:]):
    call = (ctypes.c_int64 * 3)(0, 1, 10)
    variant(number).call_at(ctypes.addressof(call))
    assert call[0] == 10 * number, (number, call[0])
"""


def start(folder: Path, *numbers: int) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), *map(str, numbers)]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_variants_compiled_by_processes_at_once_are_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "variants.py").write_text(MODULE)
    for order in ((1, 2, 3, 4), (4, 3, 2, 1)), ((1, 2, 3, 4), (2, 1, 4, 3)):
        processes = [start(tmp_path, *numbers) for numbers in order]
        results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
        assert all(code == 0 for _, code in results), results
