"""Checks of the arguments of SOK's calls: another type ends in an error that names the argument."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, expect
from viviane.core.optional import require
from viviane.core.whole_numbers import whole_numbers


def fitting(where: str, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse arguments with which a function cannot be called.

    Raises:
        ConfigError: one is missing, unknown, or one too many.

    Example:
        >>> fitting("Saver", lambda filepath: None, (), {})
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: the arguments do not fit the call
          where:   Saver
          value:   "missing a required argument: 'filepath'"
          allowed: filepath
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        names = [name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        raise ConfigError(
            "the arguments do not fit the call", where=where, value=str(error), allowed=", ".join(names) or "none"
        ) from None


def listed(what: str, value: Any) -> list[Any]:
    """Return the items of an iterable; text, dicts and single values are refused.

    Example:
        >>> listed("variables", (1, 2))
        [1, 2]
    """
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable):
        with suppress(TypeError):  # a tensor without dimensions
            return list(value)
    raise ConfigError(f"{what} has the wrong type", value=type(value).__name__, allowed="a list")


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of a gradient and its variable.

    Example:
        >>> pairs_of(zip([1.0], ["v"]))
        [(1.0, 'v')]
    """
    every = [tuple(listed("a pair of grads_and_vars", one)) for one in listed("grads_and_vars", grads_and_vars)]
    if any(len(one) != 2 for one in every):
        raise ConfigError("grads_and_vars are pairs", allowed="(gradient, variable)", fix="zip(gradients, variables)")
    return every


def float_rows(what: str, value: Any) -> NDArray[np.float32]:
    """Return an array of float32.

    Example:
        >>> float_rows("values", [[1, 2]]).tolist()
        [[1.0, 2.0]]
    """
    try:
        found = np.asarray(value)
        if found.dtype.kind in "fiub":
            return found.astype(np.float32)
        if found.dtype.kind != "c":  # bfloat16 and the like
            return np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what} must be numbers", value=str(error)) from error
    raise ConfigError(f"{what} must be real numbers", value=str(found.dtype))


def number(what: str, value: Any, kind: type[int] | type[float]) -> Any:
    """Return a number given as such or as text, of one kind.

    Example:
        >>> number("max_capacity", 8.0, int)
        8
    """
    try:
        if isinstance(value, str | int | float | np.integer | np.floating):
            found = kind(value)
            if isinstance(value, str) or found == value or kind is float:
                return found
    except (ValueError, OverflowError):
        pass  # text that is no number, or NaN and infinity as a whole number: refused like another type
    allowed = "a whole number" if kind is int else "a number"
    raise ConfigError(f"{what} has the wrong type", value=f"{type(value).__name__} {value!r}"[:200], allowed=allowed)


def whole_keys(what: str, value: Any) -> NDArray[np.int64]:
    """Return keys as an array of int64, of any shape.

    Example:
        >>> whole_keys("indices", [[3], [4.0]]).tolist()
        [[3], [4]]
    """
    try:
        found = value if isinstance(value, list | tuple) else np.asarray(value)  # one of a list may round large numbers
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must be whole numbers", value=str(error)[:200]) from error
    return whole_numbers(found, np.int64, what)


def positive(what: str, value: Any) -> int:
    """Return a whole number of at least 1, given as `number` takes it.

    Example:
        >>> positive("slot_num", "3")
        3
    """
    found: int = number(what, value, int)
    if found < 1:
        raise ConfigError(f"{what} is out of range", value=found, allowed="at least 1")
    return found


def type_name(what: str, value: Any) -> str:
    """Return the name of a type of TensorFlow's."""
    try:
        return str(require("tensorflow", extra="tensorflow", purpose="viviane.tensorflow").as_dtype(value).name)
    except TypeError as error:
        raise ConfigError(f"{what} is no type", value=str(error)) from error


def folder_of(what: str, value: Any) -> Path:
    """Return a path.

    Example:
        >>> folder_of("path", "tables").name
        'tables'
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{what} has the wrong type", value=type(value).__name__, allowed="str or Path")
    return Path(value)


def optional(what: str, value: Any, *kinds: type) -> Any:
    """Return None, or a value of one of the kinds."""
    if value is not None:
        expect(what, value, *kinds)
    return value
