"""Put the report's parts on one self-contained page."""

from __future__ import annotations

from datetime import datetime
from html import escape
from importlib import resources
from pathlib import Path

from viviane.core.files import write_bytes_atomic
from viviane.report import sections
from viviane.report.record import RunRecord

REPORT_FILE = "report.html"


def write_report(run_folder: str | Path) -> Path:
    """Write report.html into a run folder from the run's own files; returns the file.

    The page holds its style and its drawings: it opens without a network and can be mailed.

    Args:
        run_folder: a folder that `Model.fit(run_folder=...)` or `viviane train` wrote.

    Raises:
        DataError: the folder holds no run, or a file of it is broken.

    Example:
        >>> from pathlib import Path
        >>> write_report(Path("no-such-run"))
        Traceback (most recent call last):
        ...
        viviane.core.errors.DataError: this folder holds no run
          where:   no-such-run
          allowed: a folder with metrics.jsonl and schema.json
          do:      train with a run folder: `viviane train config.json --run-folder runs/mine`
    """
    run = RunRecord.load(run_folder)
    target = run.folder / REPORT_FILE
    write_bytes_atomic(target, render(run).encode("utf-8"))
    return target


def render(run: RunRecord) -> str:
    """Return the whole page as HTML."""
    name = str(run.config.get("name") or run.folder.resolve().name)
    written = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    body = "".join(
        (
            sections.cards(run),
            sections.curves(run),
            sections.calibration(run),
            sections.data(run),
            sections.stages(run),
            sections.model(run, _graph(run)),
        )
    )
    return plain_page(name, f"Viviane training report, written {written}", body)


def plain_page(title: str, line: str, body: str) -> str:
    """Return a self-contained page in the report's style.

    Args:
        title: of the page.
        line: text below the title.
        body: HTML.

    Example:
        >>> "<h1>a &lt; b</h1>" in plain_page("a < b", "", "<p>text</p>")
        True
    """
    style = (resources.files("viviane.report") / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Viviane</title><style>{style}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(line)}</p></header>"
        f"{body}</main></body></html>\n"
    )


def _graph(run: RunRecord) -> str:
    """Draw the model, where it is a graph; a plain torch module has no drawing."""
    if not run.graph:
        return ""
    from viviane.model.plot import graph_svg

    return graph_svg(run.graph, run.schema)
