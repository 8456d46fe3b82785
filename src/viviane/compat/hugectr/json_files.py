"""JSON as HugeCTR reads it: of a key that stands twice in one object the last one counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from viviane.compat.hugectr.arguments import say
from viviane.core.errors import ConfigError, suggest


def load(file: str | Path) -> Any:
    """Read a JSON file; a key that stands twice is warned of.

    Raises:
        ConfigError: there is no such file, or it is not JSON; line and column are named.
    """

    def last_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result and result[key] != value:
                say(f"Warning: {file}: {key!r} stands twice in one object; the last one counts")
            result[key] = value
        return result

    path = Path(file)
    if not path.is_file():
        raise ConfigError("no such JSON file", where=str(path), value=str(path.resolve()),
                          fix="correct the path, which counts from the working directory")  # fmt: skip
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=last_of_each)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("the file is not JSON", where=str(path), value=str(error), fix="correct it") from error


def check_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Warn of keys that are not known; HugeCTR leaves them out too, and says nothing."""
    names = set(known)
    for key in given:
        if key not in names:
            near = suggest(key, names)
            hint = f"; {near}" if near.startswith("did") else ""
            say(f"Warning: {where}: the key {key!r} is not known and has no effect{hint}")
