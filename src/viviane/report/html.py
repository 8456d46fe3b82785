"""HTML from Jinja2 templates, which escape every value that is not `Markup`."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(loader=PackageLoader("viviane.report"), autoescape=True, undefined=StrictUndefined)


def part(name: str, *values: Any, **named: Any) -> Markup:
    """Return the HTML of a macro of templates/parts.html.

    Example:
        >>> str(part("details", "a < b"))
        '<details><summary>show</summary><pre>a &lt; b</pre></details>'
    """
    from markupsafe import Markup

    return Markup(getattr(_environment().get_template("parts.html").module, name)(*values, **named))


def trusted(text: str) -> Markup:
    """Mark text as HTML that is inserted as it is, such as an <svg> element whose own values are escaped."""
    from markupsafe import Markup

    return Markup(text)


def page(title: str, line: str, body: str, *, heading: str = "") -> str:
    """Return a self-contained page in the report's style.

    Args:
        title: of the page.
        line: text below the heading.
        body: HTML.
        heading: "" shows the title.

    Example:
        >>> "<h1>a &lt; b</h1>" in page("a < b", "", "<p>text</p>")
        True
    """
    style = (resources.files("viviane.report") / "style.css").read_text(encoding="utf-8")
    template = _environment().get_template("page.html")
    return template.render(title=title, line=line, body=trusted(body), heading=heading, style=trusted(style))
