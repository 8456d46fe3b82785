"""The forms that a model is exported to: each writes a program to files and loads them."""

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
    """Interface of a form's module."""

    KERNELS: bool
    """Whether its programs contain operators of `viviane.export.operators`."""

    def check(self) -> None:
        """Raise an error if something is missing to write this form."""

    def write(self, trace: Trace, folder: Path) -> tuple[tuple[str, ...], Requirements]:
        """Write files into a folder; return their names and requirements."""

    def load(self, folder: Path, files: tuple[str, ...], requires: Requirements, threads: int | None) -> Runner:
        """Open verified files."""


def form_module(name: FormName) -> FormModule:
    """Return the module of a form; its libraries are imported when it writes or loads."""
    return cast(FormModule, importlib.import_module(_MODULES[name]))
