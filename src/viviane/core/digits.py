"""Numbers in texts that come from a user, a file or a network."""

from __future__ import annotations

from typing import Final

_MOST_DIGITS: Final = 18  # all such numbers fit into 64 bits


def number_in(text: str | bytes) -> int | None:
    """Return the number that a text consists of, 0 to 10^18 - 1; None if it is anything else.

    `isdigit` is also true of a superscript, of which `int` makes no number, and of 5,000 digits, which `int` refuses.

    Example:
        >>> number_in("42"), number_in("-1"), number_in("9" * 19)
        (42, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None
