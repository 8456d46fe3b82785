"""The base class of all settings: frozen, unknown keys refused, errors that name the key and the nearest valid one."""

from __future__ import annotations

from typing import Any, Final, Self, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from viviane.config.aliases import setting_meant, suggest_setting
from viviane.core.errors import ConfigError, VivianeError
from viviane.core.json_files import read_json
from viviane.core.locations import AnyPath
from viviane.core.yaml_files import is_yaml, read_yaml

_SECRET_WORDS: Final = ("passw", "secret", "credential", "username", "user_name")
_SHOWN: Final = 3
_SECRET_FIX: Final = "remove it: users and passwords come only from variables of the environment"


class Settings(BaseModel):
    """A frozen group of settings.

    Example:
        >>> class Size(Settings):
        ...     rows: int = 1
        >>> Size(row=2)
        Traceback (most recent call last):
        ...
        viviane.core.errors.ConfigError: Size: unknown key
          where:   row
          value:   2
          do:      did you mean 'rows'?
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    # Nested settings are then validated by pydantic, so that an error keeps its full path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @field_validator("*", mode="after")
    @classmethod
    def _representable(cls, value: Any) -> Any:
        """Refuse NUL characters and integers that need more than 64 bits."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("text must not contain a NUL character")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise ValueError("the integer does not fit 64 bits")
        return value

    @classmethod
    def from_dict(cls, data: Any, where: str | None = None) -> Self:
        """Build from plain data; errors begin with `where` (a file name)."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error, cls, where) from None

    @classmethod
    def from_json_file(cls, path: str | AnyPath) -> Self:
        """Build from a JSON file, or a YAML file by its ending."""
        return cls.from_dict(load_json(path), where=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` accepts."""
        return self.model_dump(mode="json")


def load_json(path: str | AnyPath) -> Any:
    """Read strict JSON from a file or URL, or plain YAML where the name ends in .yaml or .yml.

    Both have the bounds of `viviane.core.json_files.parse_json`. The key "$schema", which editors read, is left out.

    Raises:
        ConfigError: the file is invalid; names file, line and column.
    """
    data = read_yaml(path) if is_yaml(path) else read_json(path)
    if isinstance(data, dict):
        data.pop("$schema", None)
    return data


def validate(kind: Any, data: Any, where: str | None = None) -> Any:
    """Validate `data` against any type, such as a union of settings, and raise `ConfigError`."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise explain(error, kind, where) from None


def explain(error: ValidationError, kind: Any, where: str | None = None) -> ConfigError:
    """Convert pydantic's first error to a readable message, with the number of further errors."""
    problems = error.errors(include_url=False)
    # A misspelt key is reported twice, as unknown and as missing: the unknown key is more informative.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    path = ".".join(str(part) for part in first["loc"]) or None
    place = ", ".join(part for part in (where, path) if part) or None
    more = f" (and {len(problems) - 1} more problem(s))" if len(problems) > 1 else ""
    subject = f"{kind.__name__}: " if isinstance(kind, type) else ""  # a union of settings has no name of its own
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        if any(word in key.lower() for word in _SECRET_WORDS):  # the value must not reach logs
            return ConfigError(f"{subject}unknown key{more}", where=place, fix=_SECRET_FIX)
        fix = _misplaced(key, kind, first["loc"]) or suggest_setting(key, _fields_at(kind, first["loc"][:-1]))
        return ConfigError(f"{subject}unknown key{more}", where=place, value=shortened(first["input"]), fix=fix)
    if first["type"] == "missing":
        return ConfigError(f"{subject}a required key is missing{more}", where=place)
    if isinstance(cause, ConfigError):
        return cause
    if isinstance(cause, VivianeError):
        return ConfigError(str(cause), where=place)
    return ConfigError(f"{subject}{_message(first)}{more}", where=place, value=shortened(first["input"]))


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return where the first value that differs from a form is, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])) or "the whole reply", f"{_message(first)}: {shortened(first['input'])}"


def _message(problem: Any) -> str:
    """Return what is wrong, without the name of the exception that a check raised."""
    return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")


def shortened(value: Any, limit: int = 200) -> Any:
    """Return `value`, or the start of its text if that is longer than `limit` characters."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # integers of thousands of digits; deeply nested objects
        return f"{type(value).__name__} that is too long to show"
    return value if len(text) <= limit else f"{text[:limit]}..."


def _fields_at(kind: Any, path: tuple[int | str, ...]) -> set[str]:
    """Return the field names that are allowed at `path` inside `kind`; for unions those of all members."""
    kinds = _settings_in(kind)
    for part in path:
        deeper = [
            inner
            for one in kinds
            if isinstance(part, str) and part in one.model_fields
            for inner in _settings_in(one.model_fields[part].annotation)
        ]
        tagged = [one for one in kinds if getattr(one.model_fields.get("type"), "default", None) == part]
        kinds = deeper or tagged or kinds  # an index or a union's tag stays at the same level
    return {name for one in kinds for name in one.model_fields}


def _misplaced(key: str, kind: Any, path: tuple[int | str, ...]) -> str | None:
    """Return what to do with a key that belongs at the top or in another section; None where it may be misspelt."""
    places: dict[str, dict[str, None]] = {}
    for one in _settings_in(kind):
        for section, field in one.model_fields.items():
            places.setdefault(section, {})[f"{section!r} at the top level"] = None
            for inner in _settings_in(field.annotation):
                for name in inner.model_fields:
                    places.setdefault(name, {})[f"{section}.{name}"] = None
    siblings = _fields_at(kind, path[:-1])
    if key not in places and setting_meant(key, siblings) is None:
        key = setting_meant(key, places.keys() - siblings) or key
    found = places.get(key, {})
    if not found or f"{path[0]}.{key}" in found:  # another form of this section has it
        return None
    return f"did you mean {' or '.join(list(found)[:_SHOWN])}?"


def _settings_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _settings_in(argument)]
