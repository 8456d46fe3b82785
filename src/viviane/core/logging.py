"""The package's logger: warnings go to stderr, as Python has it, unless the program sets up logging of its own."""

from __future__ import annotations

import logging

_ROOT = "viviane"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one part, below "viviane".

    Example:
        >>> get_logger("etl").name
        'viviane.etl'
    """
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
