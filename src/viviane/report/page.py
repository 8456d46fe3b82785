"""Put the report's parts on one self-contained page."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from viviane.core.errors import DataError
from viviane.core.files import write_bytes_atomic
from viviane.report import html, quality, sections
from viviane.report.record import RunRecord
from viviane.training import History

REPORT_FILE = "report.html"


def write_report(run_folder: str | Path | History) -> Path:
    """Write report.html into a run folder from the run's own files; returns the file.

    The page holds its style and its drawings: it opens without a network and can be mailed.

    Args:
        run_folder: a folder that `Model.fit(run_folder=...)` or `viviane train` wrote; or the history of such a fit.

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
    if isinstance(run_folder, History):
        if run_folder.run_folder is None:
            raise DataError("the fit has no run folder to report on", fix="pass run_folder= to fit")
        run_folder = run_folder.run_folder
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
            quality.separation(run),
            quality.calibration(run),
            quality.importance(run),
            sections.data(run),
            sections.stages(run),
            sections.tiers(run),
            sections.machine(run),
            sections.model(run, _graph(run)),
        )
    )
    return html.page(name, f"Viviane training report, written {written}", body)


def _graph(run: RunRecord) -> str:
    """Draw the model, where it is a graph; a plain torch module has no drawing."""
    if not run.graph:
        return ""
    from viviane.model.plot import graph_svg

    return graph_svg(run.graph, run.schema)
