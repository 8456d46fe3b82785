"""Imports of optional libraries where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from viviane.core.errors import MissingExtraError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`; the error for a missing one names the extra that installs it.

    Example:
        >>> require("json", extra="etl", purpose="reading JSON").__name__
        'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{purpose} needs the library {module.split('.', maxsplit=1)[0]!r}, which could not be imported",
            value=str(error),
            fix=f"pip install 'viviane[{extra}]'",
        ) from error


def triton_loads() -> bool:
    """Whether Triton can be imported: after TensorFlow, whose LLVM is visible to all libraries, it ends the process."""
    return "triton" in sys.modules or "tensorflow" not in sys.modules


def import_triton_first() -> None:
    """Import Triton, where it is installed, before a caller imports TensorFlow; afterwards it is too late."""
    if triton_loads() and find_spec("triton") is not None:
        importlib.import_module("triton")
