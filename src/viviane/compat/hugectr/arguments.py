"""Calls with HugeCTR's arguments: defaults, positions, arguments without effect, refused arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from viviane.compat.hugectr.argument_types import checked_type
from viviane.compat.hugectr.versions import older_names
from viviane.core.errors import ConfigError, suggest

REQUIRED: Final = object()
_unused: dict[str, list[str]] = {}


def say(line: str) -> None:
    """Print a line to the console, from rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    sys.stdout.write(f"[HUGECTR] {line}\n")
    sys.stdout.flush()


def note(owner: str, what: str) -> None:
    """Record that an argument was accepted but has no effect."""
    listed = _unused.setdefault(owner, [])
    if what not in listed:
        listed.append(what)


def print_notes() -> None:
    """Print once which arguments were accepted without effect."""
    for owner, listed in _unused.items():
        say(f"Note: {owner}: accepted, without effect here: {', '.join(listed)}")
    _unused.clear()


@dataclass(frozen=True)
class Signature:
    """The arguments of one of HugeCTR's calls; other versions use the names in `versions`.

    Args:
        name: name of the call.
        defaults: default value by argument, in HugeCTR's order; REQUIRED if there is none.
        speed: arguments that affect speed and placement, but not results: accepted and noted.
        refused: arguments that must keep their default, with a suggestion for each.

    Example:
        >>> Signature("F", {"a": REQUIRED, "b": 2}).bind((1,), {})
        {'a': 1, 'b': 2}
    """

    name: str
    defaults: Mapping[str, Any]
    speed: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    def bind(self, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for each argument; tuples and NumPy arrays become lists if HugeCTR expects a list.

        Raises:
            ConfigError: an argument is unknown, missing, given twice, of another type, or refused.
        """
        if len(args) > len(self.defaults):
            raise ConfigError("too many arguments", where=self.name, value=len(args), allowed=", ".join(self.defaults))
        values, older = dict(zip(self.defaults, args, strict=False)), older_names(self.name)
        for word, value in given.items():
            name = older.get(word, word)
            if name not in self.defaults:
                fix = suggest(name, self.defaults)
                raise ConfigError("unknown argument of HugeCTR's call", where=self.name, value=name, fix=fix)
            if name in values:
                raise ConfigError("an argument is given twice", where=self.name, value=name)
            values[name] = value
        values = {
            name: checked_type(self.name, name, _plain(value, self.defaults[name]), self.defaults[name], REQUIRED)
            for name, value in values.items()
        }
        for name, default in self.defaults.items():
            if name not in values:
                if default is REQUIRED:
                    raise ConfigError("an argument is missing", where=self.name, value=name)
                continue
            if name in self.refused and _differs(values[name], default):
                fix = self.refused[name]
                raise ConfigError("an argument is not supported", where=f"{self.name}, {name}", value=values[name],
                                  fix=fix)  # fmt: skip
            if name in self.speed and _differs(values[name], default):
                note(self.name, name)
        copies = {k: list(v) if isinstance(v, list) else v for k, v in self.defaults.items()}
        return {**copies, **values}


def _plain(value: Any, default: Any) -> Any:
    """Convert NumPy numbers and arrays to Python's, and a tuple to a list if the default is a list."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) and isinstance(default, list) else value


def _differs(value: Any, default: Any) -> bool:
    return bool(value is not default and value != default)


class Arguments:
    """A HugeCTR object with its constructor arguments as attributes."""

    signature: ClassVar[Signature]

    def __init__(self, *args: Any, **given: Any) -> None:
        vars(self).update(self.signature.bind(args, given))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.signature.name} has no {name!r}")

    def __repr__(self) -> str:
        return f"{self.signature.name}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
