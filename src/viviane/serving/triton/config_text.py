"""Triton's config.pbtxt, written from plain data in the text format of protocol buffers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


class Word(str):
    """A name of an enumeration, written without quotes."""


def text_of(fields: Mapping[str, Any], indent: str = "") -> str:
    """Return fields as text: groups for mappings, one field per element for sequences of mappings.

    Example:
        >>> print(text_of({"name": "ctr", "input": [{"data_type": Word("TYPE_FP32"), "dims": [-1]}]}), end="")
        name: "ctr"
        input {
          data_type: TYPE_FP32
          dims: [-1]
        }
    """
    lines = []
    for name, value in fields.items():
        for one in _occurrences(value):
            if isinstance(one, Mapping):
                lines.append(f"{indent}{name} {{\n{text_of(one, indent + '  ')}{indent}}}\n")
            else:
                lines.append(f"{indent}{name}: {_scalar(one)}\n")
    return "".join(lines)


def map_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a map field as its entries."""
    return [{"key": key, "value": value} for key, value in values.items()]


def _occurrences(value: Any) -> Sequence[Any]:
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return value
    return [value]


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)
    if isinstance(value, list):
        return f"[{', '.join(_scalar(one) for one in value)}]"
    return str(value)
