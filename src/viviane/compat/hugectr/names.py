"""Conversion of HugeCTR's tensor names, which may be any text, to graph names of letters, digits, "_" and "-".

Other characters are replaced by their code: "fc.1" is "fc_x2e_1". Scripts and JSON use the original names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_\-]+")
_given: dict[str, str] = {}
"""The script's name of each changed name."""


def graph_name(name: str) -> str:
    """Return the name of a tensor in a graph; valid names are not changed.

    Example:
        >>> graph_name("fc.1"), graph_name("fc_1")
        ('fc_x2e_1', 'fc_1')
    """
    if not isinstance(name, str) or _PLAIN.fullmatch(name) or not name:
        return name
    changed = re.sub(r"[^A-Za-z0-9_\-]", lambda found: f"_x{ord(found[0]):x}_", name)
    _given[changed] = name
    return changed


def graph_names(names: Any) -> Any:
    """Return the graph name of one name, or of each in a list."""
    return graph_name(names) if isinstance(names, str) else [graph_name(name) for name in names]


def script_name(name: Any) -> Any:
    """Return the script's name of a tensor, or of each in a list.

    Example:
        >>> script_name([graph_name("a b"), "c"])
        ['a b', 'c']
    """
    if isinstance(name, Sequence) and not isinstance(name, str):
        return [script_name(one) for one in name]
    return _given.get(name, name)
