"""JSON from untrusted sources: parsed strictly, with limits on size, depth and length of numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from viviane.core.errors import ConfigError, ConfigNotFoundError, VivianeError
from viviane.core.locations import AnyPath, location

MAX_JSON_BYTES: Final = 256 << 20
MAX_JSON_DEPTH: Final = 64
_MAX_DIGITS: Final = 400  # of a float literal; the value of an integer is limited instead
_INTEGERS: Final = range(-(1 << 63), 1 << 64)
_RARE: Final = re.compile(r"\\u(?:0000|d[89a-f])|\x00", re.IGNORECASE)

RepeatedKey = Callable[[str, Any, Any], None]
"""Called with a key that occurs twice in an object, and both values; the last value is used."""


def read_json(
    path: str | AnyPath,
    *,
    error: type[VivianeError] = ConfigError,
    max_bytes: int = MAX_JSON_BYTES,
    encoding: str = "utf-8",
    repeated_key: RepeatedKey | None = None,
) -> Any:
    """Read a JSON file or URL; arguments and errors as for `parse_json`.

    Raises:
        ConfigNotFoundError: the file does not exist, and `error` is ConfigError.
    """
    place = location(path)
    try:
        with place.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        kind = ConfigNotFoundError if error is ConfigError else error
        raise kind("no such file", where=str(path)) from None
    except OSError as problem:
        raise error("cannot read the JSON file", where=str(path), value=str(problem)) from problem
    return parse_json(
        data, where=str(path), error=error, max_bytes=max_bytes, encoding=encoding, repeated_key=repeated_key
    )


def read_json_object(path: str | AnyPath, *, error: type[VivianeError] = ConfigError) -> dict[str, Any]:
    """Read a JSON file whose outermost value is an object; errors as for `read_json`."""
    return json_object(read_json(path, error=error), where=str(path), error=error)


def json_object(value: Any, *, where: str, error: type[VivianeError] = ConfigError) -> dict[str, Any]:
    """Return `value` if it is a JSON object.

    Example:
        >>> json_object({"rows": 3}, where="info.json")
        {'rows': 3}
    """
    if not isinstance(value, dict):
        raise error("the JSON file does not contain an object", where=where, value=_short(value), allowed="an object")
    return value


def parse_json(
    data: str | bytes,
    *,
    where: str | None = None,
    error: type[VivianeError] = ConfigError,
    max_bytes: int = MAX_JSON_BYTES,
    encoding: str = "utf-8",
    repeated_key: RepeatedKey | None = None,
) -> Any:
    """Parse strict JSON of limited size.

    Refused: more than `max_bytes`, deeper than 64 objects and lists, integers outside [-2^63, 2^64), numbers beyond
    float64 (1e999), NaN and Infinity, comments, repeated keys, NUL characters and halves of surrogate pairs in text.

    Args:
        data: text, or bytes in `encoding`.
        where: location for errors, usually the path of the file.
        error: class of the errors raised.
        max_bytes: maximum size.
        encoding: encoding of bytes.
        repeated_key: called for a repeated key; None refuses repeated keys.

    Raises:
        VivianeError: of class `error`, with line and column if the parser reports them.

    Example:
        >>> parse_json('{"rows": 3}')
        {'rows': 3}
        >>> parse_json('{"rows": 1e999}')
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: a number in JSON is out of range
          value:   '1e999'
          allowed: integers from -2^63 to 2^64 - 1; |x| < 1.8e308
    """
    if len(data) > max_bytes:
        raise error("the JSON is too large", where=where, value=f"over {max_bytes:,} bytes",
                    allowed=f"at most {max_bytes:,} bytes")  # fmt: skip
    try:
        text = data if isinstance(data, str) else data.decode(encoding)
        value = json.loads(text, **_hooks(where, error, repeated_key))
    except json.JSONDecodeError as problem:
        at = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"not valid JSON: {problem.msg}", where=f"{where}, {at}" if where else at) from problem
    except UnicodeDecodeError as problem:
        raise error(
            f"cannot read the JSON file: it is not {encoding} text", where=where, value=str(problem)
        ) from problem
    except RecursionError:
        raise _too_deep(where, error) from None
    _check_depth(value, where, error)
    if _RARE.search(text):
        _check_texts(value, where, error)
    return value


@contextmanager
def expected_form(where: str | None, error: type[VivianeError] = ConfigError) -> Iterator[None]:
    """Convert errors of Python for missing keys or wrong types in parsed content to an `error`.

    The block must only unpack plain data, since any error in it is reported as an error of the file.

    Example:
        >>> with expected_form("info.json"):
        ...     int({"rows": None}["rows"])
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: the file does not have the expected form
        ...
    """
    try:
        yield
    except VivianeError:
        raise
    except KeyError as problem:
        raise error("a key is missing in the file", where=where, value=str(problem.args[0])) from problem
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as problem:
        said = f"{type(problem).__name__}: {problem}"[:300]
        raise error("the file does not have the expected form", where=where, value=said) from problem


def json_or_text(text: str, *, where: str) -> Any:
    """Return a command-line value: parsed if it is JSON, else the text itself; errors as for `parse_json`.

    Example:
        >>> json_or_text("[1, 2]", where="--set"), json_or_text("criteo", where="--set")
        ([1, 2], 'criteo')
    """
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (json.JSONDecodeError, RecursionError) as problem:
        if isinstance(problem, RecursionError):
            raise _too_deep(where, ConfigError) from None
        return text
    return parse_json(text, where=where)


def _hooks(where: str | None, error: type[VivianeError], repeated_key: RepeatedKey | None) -> dict[str, Any]:
    def out_of_range(text: str) -> VivianeError:
        allowed = "integers from -2^63 to 2^64 - 1; |x| < 1.8e308"
        shown = text if len(text) <= 40 else f"{text[:40]}... ({len(text):,} characters)"
        return error("a number in JSON is out of range", where=where, value=shown, allowed=allowed)

    def integer(text: str) -> int:
        if len(text) > 20 or (value := int(text)) not in _INTEGERS:
            raise out_of_range(text)
        return value

    def real(text: str) -> float:
        if len(text) > _MAX_DIGITS or math.isinf(value := float(text)):
            raise out_of_range(text)
        return value

    def constant(name: str) -> Any:
        raise error("not a JSON number", where=where, value=name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: dict[str, Any] = {}
            for key, value in items:
                if key in seen:
                    if repeated_key is None:
                        raise error("the same key occurs twice in one JSON object", where=where, value=key[:80])
                    repeated_key(key, seen[key], value)
                seen[key] = value
        return result

    return {"parse_int": integer, "parse_float": real, "parse_constant": constant, "object_pairs_hook": pairs}


def _check_depth(value: Any, where: str | None, error: type[VivianeError]) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep(where, error)


def _too_deep(where: str | None, error: type[VivianeError]) -> VivianeError:
    return error("the JSON is nested too deeply", where=where, allowed=f"at most {MAX_JSON_DEPTH} levels")


def _check_texts(value: Any, where: str | None, error: type[VivianeError]) -> None:
    """Refuse text with NUL characters or surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    if "\\u0000" in text.replace("\\\\", ""):
        raise error("text in JSON contains a NUL character", where=where, value="\\u0000")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        half = text[problem.start : problem.start + 1]
        what = "text in JSON contains half of a surrogate pair, which UTF-8 cannot encode"
        raise error(what, where=where, value=ascii(half).strip("'")) from None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
