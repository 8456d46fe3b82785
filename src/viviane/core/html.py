"""Small HTML tables for notebooks: self-contained, without scripts, readable in light and dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

MOST_ROWS: Final = 60


def html_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> str:
    """Return a table with a title; of more than 60 rows, show the first 50 and the last 10.

    Numbers are right-aligned; text is escaped.

    Example:
        >>> "<td>a &lt; b</td>" in html_table("t", ["x"], [["a < b"]])
        True
    """
    shown: list[Sequence[Any] | None] = list(rows)
    if len(rows) > MOST_ROWS:
        shown = [*rows[:50], None, *rows[-10:]]
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    left_out = f"<tr><td colspan={len(headings)}>... {len(rows) - 60:,} more ...</td></tr>"
    body = "".join(left_out if row is None else f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown)
    below = f"<div>{escape(note)}</div>" if note else ""
    return f"<div><b>{escape(title)}</b><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "<td></td>"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape(str(value))}</td>"
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f'<td style="text-align:right">{text}</td>'
