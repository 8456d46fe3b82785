"""The format of torch.export; lookups are operators of `viviane.export` with its kernels, or torch's operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from viviane.core.errors import ExportError
from viviane.export.forms.archive import check_program_archive
from viviane.export.forms.form import Runner, Trace, check_space, quiet
from viviane.export.machine import Requirements, torch_version

KERNELS = True
FILE = "torch-export.pt2"


def check() -> None:
    """Do nothing: no library is needed."""


def write(trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
    """Write the traced program.

    Raises:
        MachineError: there is no room for it.
    """
    check_space(trace, folder)
    exported = trace.exported
    exported.example_inputs = None  # they would be stored, but are not used
    with quiet():
        torch.export.save(exported, folder / FILE)
    major, minor = torch_version()
    needs = Requirements(torch_from=f"{major}.{minor}", torch_below=f"{major + 1}.0", device=trace.device)
    return (FILE,), needs


def load(folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
    """Read the program; operators of `viviane.export` are registered here.

    Raises:
        ExportError: torch cannot read it, or would unpickle a part of it.
    """
    from viviane.export import operators  # noqa: F401 - registers them

    check_program_archive(folder / files[0])
    try:
        with quiet():
            module = torch.export.load(folder / files[0]).module()
    except Exception as error:
        raise ExportError("torch cannot read the program", where=str(folder / files[0]), value=str(error)) from error
    return _Run(module)


class _Run:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            try:
                result: Tensor = self._module(*tensors)
            except ValueError as error:  # the inputs of the program are not those that the manifest names
                said = str(error).strip().split("\n", 1)[0]
                raise ExportError(
                    "the program does not fit the manifest", value=said, fix="use another copy"
                ) from error
        return result

    def update(self, weights: Mapping[str, Tensor]) -> None:
        own = self._module.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
