"""Readable errors: what happened, where, the value, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final

_ABSENT: Final = object()
_MOST_WHAT: Final = 6000  # characters; a message may contain the message of another process
_MOST_WHERE: Final = 600
_MOST_VALUE: Final = 1000
_MOST_ADVICE: Final = 2000


class VivianeError(Exception):
    """Base of every error that Viviane raises on purpose.

    The message leaves out the middle of texts that are too long to read; the attributes keep the whole.

    Args:
        what: what went wrong, in one line.
        where: feature, table, file, row, step: everything needed to locate the cause.
        value: the invalid value.
        allowed: the accepted values.
        fix: how to fix it.

    Example:
        >>> print(VivianeError("key out of range", where="feature 'c1'", value=9, allowed="0 <= key < 5"))
        key out of range
          where:   feature 'c1'
          value:   9
          allowed: 0 <= key < 5
    """

    ag_pass_through = True
    """By this TensorFlow's AutoGraph knows errors that leave `tf.function` as they are; others it replaces."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        value: Any = _ABSENT,
        allowed: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.value = None if value is _ABSENT else value
        self.allowed = allowed
        self.fix = fix
        lines = [_clipped(what, _MOST_WHAT)]
        if where is not None:
            lines.append(f"  where:   {_clipped(str(where), _MOST_WHERE)}")
        if value is not _ABSENT:
            shown = _clipped(value, _MOST_VALUE) if isinstance(value, str) else value
            lines.append(f"  value:   {shown!r}" if isinstance(value, str) else f"  value:   {_text(value)}")
        if allowed is not None:
            lines.append(f"  allowed: {_clipped(allowed, _MOST_ADVICE)}")
        if fix is not None:
            lines.append(f"  do:      {_clipped(fix, _MOST_ADVICE)}")
        super().__init__("\n".join(lines))

    def move_to(self, where: str) -> None:
        """Name another place than the one that it was raised with, such as rows in memory for their temporary file.

        Example:
            >>> error = VivianeError("a null", where="/tmp/part-0, row 3")
            >>> error.move_to("the given dict, row 3")
            >>> print(error)
            a null
              where:   the given dict, row 3
        """
        old, new = (f"\n  where:   {_clipped(text, _MOST_WHERE)}" for text in (str(self.where), where))
        self.args = (str(self).replace(old, new, 1),)
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are sent between processes by pickling their args; here that is the formatted text.
        return _rebuild, (type(self), str(self), self.__dict__)


def _clipped(text: str, most: int) -> str:
    """Return a text with its middle left out if it is longer than `most` characters, such as a path of 5,000."""
    if len(text) <= most:
        return text
    half = most // 2 - 20
    return f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


def _text(value: Any) -> str:
    try:
        return _clipped(str(value), _MOST_VALUE)
    except (ValueError, RecursionError):  # integers of thousands of digits; deeply nested objects
        return f"{type(value).__name__} that is too long to show"


def _rebuild(kind: type[VivianeError], text: str, fields: dict[str, Any]) -> VivianeError:
    # With several bases, only the one that determines the object layout can create it: OSError if it is a base.
    error = OSError.__new__(kind) if issubclass(kind, OSError) else kind.__new__(kind)
    Exception.__init__(error, text)
    error.__dict__.update(fields)
    return error


class ConfigError(VivianeError, ValueError):
    """A setting from Python, JSON or the command line is unknown or out of range."""


class SchemaError(VivianeError, ValueError):
    """A schema is inconsistent, or data do not match their schema."""


class ConfigNotFoundError(ConfigError, FileNotFoundError):
    """A file of settings does not exist."""


class SchemaNotFoundError(SchemaError, FileNotFoundError):
    """A schema does not exist."""


class DataError(VivianeError, ValueError):
    """A data file is missing, malformed, truncated or altered."""


class DataNotFoundError(DataError, FileNotFoundError):
    """A data set, raw file or fitted ETL does not exist."""


class KeyRangeError(VivianeError, IndexError):
    """A key is outside its embedding table."""


class CheckpointError(VivianeError):
    """A checkpoint is missing, truncated, altered, or belongs to another model."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint or saved model does not exist."""


class NumericsError(VivianeError, ArithmeticError):
    """A loss, gradient or weight is NaN or infinite."""


class ProcessError(VivianeError, RuntimeError):
    """Another process of the group failed, died or stalled."""


class RemoteError(DataError):
    """A remote store refuses a request, does not respond, or returns other data than were written."""


class ExportError(VivianeError):
    """A model cannot be exported, or an artifact is damaged, differs from its model, or needs another machine."""


class StoreError(VivianeError):
    """A tier or store cannot be read or written, or its content is damaged or has another format."""


class MachineError(VivianeError, OSError):
    """The operating system refuses: no memory, a full or read-only disk, no permission, a process limit."""


class MissingExtraError(VivianeError, ImportError):
    """An optional library is not installed; names the extra that installs it."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion: the nearest known name, or the list of known names.

    Example:
        >>> suggest("batch_sise", ["batch_size", "lr"])
        "did you mean 'batch_size'?"
    """
    names = sorted(known)
    meant = nearest(name, names)
    return "choose one of: " + ", ".join(names) if meant is None else f"did you mean {meant!r}?"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is almost spelt so; None if there is none.

    Example:
        >>> nearest("batch_sise", ["batch_size", "lr"]), nearest("rows", ["batch_size", "lr"])
        ('batch_size', None)
    """
    names = sorted(known)
    same = [one for one in names if one.casefold() == name.casefold()]  # far apart for difflib: Relu, ReLU
    near = same or difflib.get_close_matches(name, names, n=1)
    return near[0] if near else None


def expect(what: str, value: Any, *kinds: type) -> None:
    """Raise an error if an argument has another type.

    Raises:
        ConfigError: the type is wrong; names the argument, its type and the allowed types.

    Example:
        >>> expect("threads", "4", int)
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: threads has the wrong type
          value:   "str '4'"
          allowed: int
    """
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    name = type(value).__name__
    shown = f"{name} {value!r}" if isinstance(value, str | int | float) else name
    allowed = " or ".join(kind.__name__ for kind in kinds)
    raise ConfigError(f"{what} has the wrong type", value=shown[:200], allowed=allowed)
