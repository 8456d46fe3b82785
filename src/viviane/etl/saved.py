"""What a saved config leaves out, so that files of configs that do not use a later setting stay as they were."""

from __future__ import annotations

from typing import Any, Final

from viviane.config.base import Settings

_ALWAYS_WRITTEN: Final = ("format", "version", "type")


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """Leave out settings at an empty default (None, False, 0, nothing in a tuple)."""
    return {key: value for key, value in data.items() if key not in names or value}


def as_written(config: Settings) -> dict[str, Any]:
    """Return a config's plain data without settings at their defaults: the file that a person would write.

    Args:
        config: of any kind; `from_dict` of its class makes the same of what is returned.
    """
    data = config.to_dict()
    _leave_out_defaults(config, data)
    return data


def _leave_out_defaults(value: Any, data: Any) -> None:
    if isinstance(value, tuple | list):
        for one, own in zip(value, data, strict=True):
            _leave_out_defaults(one, own)
    elif isinstance(value, Settings):
        for name, field in type(value).model_fields.items():
            if name not in data or name in _ALWAYS_WRITTEN:
                continue
            if not field.is_required() and getattr(value, name) == field.get_default(call_default_factory=True):
                del data[name]
            else:
                _leave_out_defaults(getattr(value, name), data[name])
