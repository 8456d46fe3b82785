"""Imports of optional libraries where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
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
