"""Where commands print their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH: Final = 140
"""Width of tables in a file or a pipe, in columns."""


def output() -> Console:
    """Return the standard output: as wide as the terminal, or wide enough for every table in a file.

    Example:
        >>> output().width > 0
        True
    """
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)
