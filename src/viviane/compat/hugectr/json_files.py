"""JSON as HugeCTR reads it: of a key that occurs twice in one object the last one counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from viviane.compat.hugectr.arguments import say
from viviane.core.errors import ConfigNotFoundError, suggest
from viviane.core.json_files import read_json


def load(file: str | Path) -> Any:
    """Read a JSON file; a key that occurs twice is warned of.

    Raises:
        ConfigError: there is no such file, or it is not JSON; line and column are named.
    """

    def last_one_counts(key: str, before: Any, value: Any) -> None:
        if before != value:
            say(f"Warning: {file}: {key!r} occurs twice in one object; the last one counts")

    path = Path(file)
    if not path.is_file():
        raise ConfigNotFoundError("no such JSON file", where=str(path), value=str(path.resolve()),
                          fix="correct the path, which counts from the working directory")  # fmt: skip
    return read_json(path, encoding="utf-8-sig", repeated_key=last_one_counts)


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Warn of keys that are not known; HugeCTR leaves them out too, and says nothing."""
    names = set(known)
    for key in given:
        if key not in names:
            near = suggest(key, names)
            hint = f"; {near}" if near.startswith("did") else ""
            say(f"Warning: {where}: the key {key!r} is not known and has no effect{hint}")
