"""CUDA C++ in the package compiles, wherever NVRTC or nvcc is found; no GPU is needed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from viviane.core.errors import VivianeError
from viviane.ops.cuda_parts import product, product_source
from viviane.ops.cuda_parts.compiling import compile_cuda, nvrtc
from viviane.ops.row_update import gpu_sort

PACKAGE = Path(gpu_sort.__file__).parents[2]
PRODUCT = ("ops/cuda_parts/product_source.py", product_source.SOURCE, "sm_90a")
SORT = ("ops/row_update/gpu_sort.py", gpu_sort.SOURCE, "sm_90")
# The source, and the macros of a launch. A launch that needs more of a device than another stands for all.
SOURCES = {
    "sort": (SORT, {"THREADS": 1024, "ITEMS": 14, "DIGIT_BITS": 9}),
    "sort by few digits": (SORT, {"THREADS": 512, "ITEMS": 8, "DIGIT_BITS": 1}),
    **{
        f"product {mode} {layers} {depths} {keeps} {kind}": (
            PRODUCT, {"MODE": mode, "PASSES": layers, "DEPTHS": depths, "STAGES": 16, "KEEPS": keeps,
                      **({kind: 1} if kind else {})}
        )
        for mode, layers, depths, keeps in (
            (product.FORWARD, 1, 8, 1), (product.FORWARD, 1, 8, 0), (product.BACKWARD, 1, 8, 1),
            (product.LAST, 3, 8, 1), (product.LAST, 1, 1, 1),
        )
        for kind in ("", "BFLOAT16")
    },
}  # fmt: skip


@pytest.fixture
def compiled(tmp_path):
    """Returns a function that compiles CUDA C++ to machine code, or fails with the compiler's words."""
    wanted = {architecture.removesuffix("a") for (_, _, architecture), _ in SOURCES.values()}

    def by_nvcc(source, options):
        (tmp_path / "source.cu").write_text(source)
        architecture, *macros = options
        name = architecture.removeprefix("-arch=sm_")  # the short form compiles for sm_90 besides sm_90a
        target = f"-gencode=arch=compute_{name},code=sm_{name}"
        command = ["nvcc", "-cubin", target, *macros, "-o", "out.cubin", "source.cu"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        if done.returncode:
            raise VivianeError("CUDA source does not compile", value=done.stdout + done.stderr)
        return (tmp_path / "out.cubin").read_bytes()

    if nvrtc() is not None:
        return compile_cuda
    if shutil.which("nvcc") is None:
        pytest.skip("neither NVRTC nor nvcc is here")
    known = subprocess.run(["nvcc", "--list-gpu-code"], capture_output=True, text=True, check=False).stdout
    if missing := wanted - set(known.split()):
        pytest.skip(f"the nvcc that is here does not know {', '.join(sorted(missing))}")
    return by_nvcc


@pytest.mark.parametrize("name", SOURCES)
def test_cuda_compiles(name, compiled):
    (_, source, architecture), macros = SOURCES[name]
    options = [f"-arch={architecture}", *(f"-D{key}={value}" for key, value in macros.items())]
    assert compiled(source, options).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", ["sort", "product 0 1 8 1 BFLOAT16"])
def test_a_fault_is_told(name, compiled):
    (_, source, architecture), macros = SOURCES[name]
    options = [f"-arch={architecture}", *(f"-D{key}={value}" for key, value in macros.items())]
    with pytest.raises(VivianeError, match="no_such_name"):
        compiled(f"{source}\n__global__ void broken() {{ no_such_name(); }}", options)


def test_every_source_is_compiled():
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "__global__" in path.read_text()}
    assert found == {path for (path, _, _), _ in SOURCES.values()}
