"""The package's logger: silent unless the program or the command line asks for it."""

from __future__ import annotations

import logging

_ROOT = "viviane"
logging.getLogger(_ROOT).addHandler(logging.NullHandler())


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one part, below "viviane".

    Example:
        >>> get_logger("etl").name
        'viviane.etl'
    """
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
