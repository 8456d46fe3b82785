"""Memory sizes in settings: bytes, or text such as "8 GiB"."""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from viviane.core.errors import ConfigError

MemorySize: TypeAlias = int | str
_UNITS: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
                 "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def num_bytes(size: MemorySize, where: str) -> int:
    """Return a memory size in bytes.

    Raises:
        ConfigError: the value is not a size, or not positive.

    Example:
        >>> num_bytes("1.5 GiB", "embedding_memory"), num_bytes(512, "embedding_memory")
        (1610612736, 512)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([a-z]{1,3})\s*", size.lower())
        if match is None or match[2] not in _UNITS:
            allowed = 'such as "8 GiB" or "500 MB"'
            raise ConfigError("not a memory size", where=where, value=size[:80], allowed=allowed)
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError("memory must be positive", where=where, value=size)
    return size
