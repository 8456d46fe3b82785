"""The forms that a model is exported to: each writes a program to files, and opens them again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final, Protocol, cast

from viviane.export.forms.form import Runner, Trace
from viviane.export.machine import Requirements
from viviane.export.manifest import FormName

__all__ = ["FormModule", "Runner", "Trace", "form_module"]

_MODULES: Final[dict[FormName, str]] = {
    "torch-export": "viviane.export.forms.torch_export",
    "aoti": "viviane.export.forms.aoti",
    "onnx": "viviane.export.forms.onnx",
    "torchscript": "viviane.export.forms.torchscript",
}


class FormModule(Protocol):
    """What the module of a form has."""

    KERNELS: bool
    """Whether its programs hold operators of `viviane.export.operators`."""

    def check(self) -> None:
        """Say at once what is missing here to write this form."""

    def write(self, trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
        """Write files into a folder; return their names and what they need."""

    def load(self, folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
        """Open files that were verified."""


def form_module(name: FormName) -> FormModule:
    """Return the module of a form; its libraries are imported when it writes or loads."""
    return cast(FormModule, importlib.import_module(_MODULES[name]))
