"""Which settings `viviane tune` searches, and between which values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from viviane.core.errors import ConfigError
from viviane.core.json_files import json_or_text

_FORMS: Final = "PATH=LOW:HIGH, PATH=LOW:HIGH:log, or PATH=VALUE,VALUE,..."


@dataclass(frozen=True)
class Range:
    """Values of one setting: between two numbers, or one of several."""

    path: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        """Let an Optuna trial choose a value."""
        if self.choices:
            return trial.suggest_categorical(self.path, self.choices)
        if self.is_whole:
            return trial.suggest_int(self.path, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(self.path, self.low, self.high, log=self.is_log)


def parse_range(text: str) -> Range:
    """Read a setting and its values.

    Raises:
        ConfigError: it is written otherwise, or the values are not a range.

    Example:
        >>> parse_range("solver.lr=1e-4:1e-2:log").is_log, parse_range("model.dim=8,16").choices
        (True, (8, 16))
    """
    path, sign, values = text.partition("=")
    if not sign or not path or not values:
        raise ConfigError("not a setting to search", where="--search", value=text, allowed=_FORMS)
    parts = values.split(":")
    if len(parts) == 1:
        choices = tuple(json_or_text(one, where=f"--search {path}") for one in values.split(","))
        if len(choices) < 2 or any(isinstance(one, list | dict) for one in choices):
            raise ConfigError("a search needs two values or more", where="--search", value=text, allowed=_FORMS)
        return Range(path, choices=choices)
    try:
        low, high = float(parts[0]), float(parts[1])
    except ValueError:
        raise ConfigError("not a range of numbers", where="--search", value=text, allowed=_FORMS) from None
    is_log = len(parts) == 3 and parts[2] == "log"
    if len(parts) > 2 + is_log or not math.isfinite(high) or not low < high or (is_log and low <= 0):
        raise ConfigError("not a range of numbers", where="--search", value=text, allowed=_FORMS)
    is_whole = all(one.strip().lstrip("-").isdecimal() for one in parts[:2])
    return Range(path, low, high, is_log, is_whole)


def default_space(settings: dict[str, Any]) -> list[Range]:
    """Return what is searched where nothing is named: learning rate, and width and dropout of a model of the zoo."""
    space = [Range("solver.lr", 1e-4, 1e-2, is_log=True)]
    model = settings.get("model", {})
    if "zoo" in model:
        space.append(Range("model.dim", choices=(8, 16, 32)))
        space.append(Range("model.dropout", 0.0, 0.5))
        space.append(Range("model.embedding_dropout", 0.0, 0.5))
    return space
