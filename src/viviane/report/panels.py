"""Panels and sections of a page; a chart that stands alone in its row is drawn as wide as the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from viviane.report import html

if TYPE_CHECKING:
    from markupsafe import Markup

HALF: Final = 520
WHOLE: Final = 1080


@dataclass(frozen=True)
class Panel:
    """A box with a title.

    Args:
        title: above the body.
        body: HTML, or a function that draws it for a width.
        note: a sentence below.
        wide: takes a whole row.
    """

    title: str
    body: str | Callable[[int], str]
    note: str = ""
    wide: bool = False

    def render(self, *, wide: bool) -> Markup:
        """Return the HTML."""
        body = self.body if isinstance(self.body, str) else self.body(WHOLE if wide else HALF)
        return html.part("panel", self.title, html.trusted(body), self.note, wide)


def section(title: str, panels: Sequence[Panel]) -> str:
    """Return a section, two panels in a row; nothing if there is no panel.

    Example:
        >>> section("Data", [Panel("Ids", "12")]).count("wide")
        1
    """
    if not panels:
        return ""
    return str(html.part("section", title, [one.render(wide=wide) for one, wide in _placed(panels)]))


def _placed(panels: Sequence[Panel]) -> list[tuple[Panel, bool]]:
    """Return the panels with whether each has a row of its own: the wide ones, and one that would stand alone."""
    placed: list[tuple[Panel, bool]] = []
    open_row = False
    for number, panel in enumerate(panels):
        is_last = number == len(panels) - 1 or panels[number + 1].wide
        wide = panel.wide or (not open_row and is_last)
        placed.append((panel, wide))
        open_row = not wide and not open_row
    return placed
