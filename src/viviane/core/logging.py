"""The package's logger: warnings go to stderr, Python's default, unless the program configures logging."""

from __future__ import annotations

import logging

_ROOT = "viviane"


def get_logger(name: str) -> logging.Logger:
    """Return a child logger of "viviane".

    Example:
        >>> get_logger("etl").name
        'viviane.etl'
    """
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
