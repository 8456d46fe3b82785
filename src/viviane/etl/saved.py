"""What a saved config leaves out, so that files of configs that do not use a later setting stay as they were."""

from __future__ import annotations

from typing import Any


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """Leave out settings at an empty default (None, False, 0, nothing in a tuple)."""
    return {key: value for key, value in data.items() if key not in names or value}
