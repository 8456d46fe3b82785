"""CUDA C++ in the package compiles, wherever NVRTC or nvcc is found; no GPU is asked for."""

import shutil
import subprocess
from pathlib import Path

import pytest

from viviane.core.errors import VivianeError
from viviane.ops.cuda_parts.compiling import compile_cuda, nvrtc
from viviane.ops.row_update import gpu_sort

ARCHITECTURE = "sm_90"
PACKAGE = Path(gpu_sort.__file__).parents[2]
# By file: the source, and the macros of a launch. A launch that needs more of a device than another stands for all.
SOURCES = {
    "ops/row_update/gpu_sort.py": (gpu_sort.SOURCE, {"THREADS": 1024, "ITEMS": 14, "DIGIT_BITS": 9}),
}


@pytest.fixture
def compiled(tmp_path):
    """Returns a function that compiles CUDA C++ to machine code, or fails with the compiler's words."""

    def by_nvcc(source, options):
        (tmp_path / "source.cu").write_text(source)
        command = ["nvcc", "-cubin", *options, "-o", "out.cubin", "source.cu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        if done.returncode:
            raise VivianeError("CUDA source does not compile", value=done.stdout + done.stderr)
        return (tmp_path / "out.cubin").read_bytes()

    if nvrtc() is not None:
        return compile_cuda
    if shutil.which("nvcc") is None:
        pytest.skip("neither NVRTC nor nvcc is here")
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    if ARCHITECTURE not in known.split():
        pytest.skip(f"the nvcc that is here does not know {ARCHITECTURE}")
    return by_nvcc


@pytest.mark.parametrize("name", SOURCES)
def test_cuda_compiles(name, compiled):
    source, macros = SOURCES[name]
    options = [f"-arch={ARCHITECTURE}", *(f"-D{key}={value}" for key, value in macros.items())]
    assert compiled(source, options).startswith(b"\x7fELF")
    with pytest.raises(VivianeError, match="no_such_name"):
        compiled(f"{source}\n__global__ void broken() {{ no_such_name(); }}", options)


def test_every_source_is_compiled():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "__global__" in path.read_text()}
    assert found == SOURCES.keys()
