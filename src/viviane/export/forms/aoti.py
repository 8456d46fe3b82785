"""AOTInductor: the program compiled to machine code for one kind of processor or GPU and one version of torch."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from viviane.core.errors import ConfigError, ExportError
from viviane.export.forms.archive import check_archive
from viviane.export.forms.form import Runner, Trace, check_space, quiet
from viviane.export.machine import Requirements, capability, cpu_flags, this_minor
from viviane.ops.dispatch import use_implementation

KERNELS = False
FILE = "aoti.pt2"
_LOADER: Final = "import sys; from torch._inductor.package.package import load_package; load_package(sys.argv[1])"
# Levels of x86-64 (psABI): instructions that compilers may use, and the widest vectors in bits.
LEVELS: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "x86-64-v3": (("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"), 256),
    "x86-64-v4": (
        (
            "abm",
            "avx",
            "avx2",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512f",
            "avx512vl",
            "bmi1",
            "bmi2",
            "f16c",
            "fma",
            "movbe",
        ),
        512,
    ),
}


def check() -> None:
    """Check that a C++ compiler exists.

    Raises:
        ExportError: there is no compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        raise ExportError(
            "AOTInductor needs a C++ compiler, and none was found",
            where="form 'aoti'",
            value=str(error).splitlines()[0],
            fix="install g++ (apt-get install g++), or set CXX to a compiler",
        ) from error


def write(trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
    """Compile the program.

    Raises:
        ExportError: the compiler failed.
        ConfigError: the instruction level is unknown, or this processor does not support it.
    """
    check_space(trace, folder)
    flags, options = _instructions(trace)
    # Otherwise a bias with one element becomes part of the code, and new weights would not replace it.
    options["always_keep_tensor_constants"] = True
    try:
        with quiet(), torch.no_grad(), use_implementation("reference"):
            torch._inductor.aoti_compile_and_package(
                trace.exported, package_path=str(folder / FILE), inductor_configs=options
            )
    except ExportError:
        raise
    except Exception as error:
        text = str(error).strip()
        raise ExportError(
            "AOTInductor could not compile the model",
            value=f"{type(error).__name__}: {text[-1500:]}",
            fix="export another form",
        ) from error
    low, below = this_minor()
    is_gpu = trace.device == "cuda"
    if is_gpu:
        check_loads(folder / FILE)
    needs = Requirements(
        torch_from=low,
        torch_below=below,
        architecture=platform.machine(),
        cpu_flags=() if is_gpu else flags,
        device=trace.device,
        capability=capability() if is_gpu else None,
    )
    return (FILE,), needs


def check_loads(file: Path) -> None:
    """Load a program in a process of its own: some releases of torch end the process that loads one for a GPU.

    Raises:
        ExportError: the process was ended by a signal. Other errors are those of `load`.
    """
    ended = subprocess.run([sys.executable, "-c", _LOADER, str(file)], capture_output=True, check=False).returncode
    if ended < 0:
        raise ExportError(
            "AOTInductor's program ends the process that loads it", where=f"form 'aoti', torch {torch.__version__}",
            value=signal.Signals(-ended).name, fix="export the form torch-export or torchscript, or use another torch",
        )  # fmt: skip


def _instructions(trace: Trace) -> tuple[tuple[str, ...], dict[str, Any]]:
    if trace.cpu == "native" or trace.device == "cuda":
        return cpu_flags(), {}
    allowed = ", ".join(["native", *LEVELS])
    if trace.cpu not in LEVELS or platform.machine() != "x86_64":
        raise ConfigError("unknown instruction level", where="cpu", value=trace.cpu, allowed=allowed)
    flags, width = LEVELS[trace.cpu]
    missing = sorted(set(flags) - set(cpu_flags()))
    if missing:
        raise ConfigError(
            "this processor lacks instructions of that level, so the artifact could not be compared with the model",
            where="cpu",
            value=", ".join(missing),
            allowed=allowed,
        )
    return flags, {"cpp.march": trace.cpu, "cpp.simdlen": width}


def load(folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
    """Load the machine code; it must come from a trusted source.

    Raises:
        ExportError: the program cannot be loaded.
    """
    from torch._inductor.package.package import load_package

    check_archive(folder / files[0])  # torch unpacks it
    try:
        with quiet():
            package = load_package(str(folder / files[0]), num_runners=max(threads or 1, 1))
    except Exception as error:
        raise ExportError(
            "AOTInductor cannot load the program", where=str(folder / files[0]), value=str(error)
        ) from error
    return _Run(package)


class _Run:
    def __init__(self, package: Any) -> None:
        self._package = package

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        result: Tensor = self._package(*tensors)
        return result

    def update(self, weights: Mapping[str, Tensor]) -> None:
        names = set(self._package.get_constant_fqns())
        lost = sorted(weights.keys() - names)
        if lost:
            raise ExportError(
                "a weight is part of the compiled code and cannot be replaced",
                where="form 'aoti'",
                value=lost[0],
                fix="export the model again",
            )
        # Not all constants are weights: constants of the trace are kept.
        self._package.load_constants(dict(weights), check_full_update=False)
