"""Export: a trained model as a program for other runtimes, compared with the model before it is written.

    vv.export("model/", to=["torch-export", "aoti", "onnx"], output="exported/")
    artifact = vv.export.load("exported/", "onnx")
    artifact.predict({"city": [3, 4]})

The package itself can be called: `vv.export(...)` is `vv.export.export(...)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from viviane.export.artifact import Artifact, load
from viviane.export.manifest import FORMS, ExportManifest, read_manifest
from viviane.export.program import Program, ProgramInput, freeze
from viviane.export.write import export

__all__ = [
    "FORMS",
    "Artifact",
    "ExportManifest",
    "Program",
    "ProgramInput",
    "export",
    "freeze",
    "load",
    "read_manifest",
]


class _Callable(ModuleType):
    """Makes the package callable: the call exports."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `viviane.export.export`."""
        return export(*args, **options)


sys.modules[__name__].__class__ = _Callable
