"""Where commands print their tables, and whether they print what is not a result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH: Final = 140
"""Width of tables in a file or a pipe, in columns."""

_state = {"quiet": False}


def set_quiet(quiet: bool) -> None:
    """Print only results, warnings and errors from now on, or everything."""
    _state["quiet"] = quiet


def is_quiet() -> bool:
    """Return whether only results, warnings and errors are printed: `viviane --quiet`."""
    return _state["quiet"]


def _make_quiet(wanted: bool) -> bool:
    if wanted:
        set_quiet(True)
    return is_quiet()


Quiet: TypeAlias = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_make_quiet, help="No progress and no summary: warnings and errors only."),
]
"""The option of commands whose result is files; `viviane --quiet COMMAND` is the same."""

ResultsOnly: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", callback=_make_quiet, help="Print results, warnings and errors only.")
]
"""The option of commands that print their result; `viviane --quiet COMMAND` is the same."""


def say(text: str = "") -> None:
    """Print a line about the work, unless the user wants it quiet."""
    if not is_quiet():
        typer.echo(text)


def output() -> Console:
    """Return the standard output: as wide as the terminal, or wide enough for every table in a file.

    Example:
        >>> output().width > 0
        True
    """
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=FILE_WIDTH, highlight=False)


def printable(text: str, most: int = 500) -> str:
    """Return text of another machine for a terminal: one line of limited length, without control characters.

    Example:
        >>> printable("ctr\\x1b[2J")
        'ctr?[2J'
    """
    shown = text if len(text) <= most else f"{text[:most]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
