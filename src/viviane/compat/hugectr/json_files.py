"""JSON files with HugeCTR's rule for repeated keys: the last one is used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from viviane.compat.hugectr.arguments import say
from viviane.core.errors import ConfigNotFoundError, suggest
from viviane.core.json_files import read_json


def load(file: str | Path) -> Any:
    """Read a JSON file, with a warning for repeated keys.

    Raises:
        ConfigError: the file does not exist, or is not JSON; names line and column.
    """

    def last_one_counts(key: str, before: Any, value: Any) -> None:
        if before != value:
            say(f"Warning: {file}: {key!r} occurs twice in one object; the last one is used")

    path = Path(file)
    if not path.is_file():
        raise ConfigNotFoundError("JSON file not found", where=str(path), value=str(path.resolve()),
                          fix="correct the path, which is relative to the working directory")  # fmt: skip
    return read_json(path, encoding="utf-8-sig", repeated_key=last_one_counts)


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Warn about unknown keys, which HugeCTR silently ignores."""
    names = set(known)
    for key in given:
        if key not in names:
            near = suggest(key, names)
            hint = f"; {near}" if near.startswith("did") else ""
            say(f"Warning: {where}: the key {key!r} is unknown and has no effect{hint}")
