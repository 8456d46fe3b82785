"""TorchScript, for old servers; deprecated by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from viviane.core.errors import ExportError, VivianeError
from viviane.export.forms.form import Runner, Trace, check_space, quiet, untraceable
from viviane.export.machine import Requirements, torch_version
from viviane.ops.dispatch import use_implementation

KERNELS = False
FILE = "torchscript.pt"


def check() -> None:
    """Do nothing: no library is needed."""


def write(trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
    """Trace the program and write it.

    Raises:
        ExportError: the program cannot be traced.
    """
    check_space(trace, folder)
    try:
        with quiet(), torch.no_grad(), use_implementation("reference"):
            script: Any = torch.jit.trace(trace.program, trace.example, check_trace=False)  # type: ignore[no-untyped-call]
            script.save(str(folder / FILE))
    except VivianeError:
        raise
    except Exception as error:
        raise untraceable(trace.program, error) from error
    major, minor = torch_version()
    return (FILE,), Requirements(torch_from=f"{major}.{minor}", torch_below=f"{major + 1}.0", device=trace.device)


def load(folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
    """Read the program.

    Raises:
        ExportError: torch cannot read it.
    """
    try:
        with quiet():
            module = torch.jit.load(str(folder / files[0]), map_location=requires.device)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ExportError("torch cannot read the program", where=str(folder / files[0]), value=str(error)) from error
    return _Run(module)


class _Run:
    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self._module = module

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            try:
                result: Tensor = self._module(*tensors)
            except RuntimeError as error:
                said = str(error).split("\n", 1)[0]
                if not said.startswith("forward()"):  # the inputs are not those of the program
                    raise
                what = "the program does not fit the manifest"
                raise ExportError(what, value=said[:200], fix="use another copy") from error
        return result

    def update(self, weights: Mapping[str, Tensor]) -> None:
        own = self._module.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
