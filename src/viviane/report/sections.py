"""The parts of the report, each a function from a run's record to HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from viviane.report import html
from viviane.report.chart import Line, bar_chart, line_chart, share_bar
from viviane.report.record import RunRecord
from viviane.report.scale import short

if TYPE_CHECKING:
    from markupsafe import Markup

TITLES = {"auc": "AUC", "log_loss": "log loss", "calibration": "calibration", "accuracy": "accuracy"}
# One line a column would hide the others: the widest columns are the ones that matter for memory.
MAX_CURVES = 8
MAX_BARS = 40
MAX_BINS = 20


def cards(run: RunRecord) -> str:
    """The figures a person looks for first."""
    items: list[tuple[str, str]] = []
    for name in run.metric_names:
        curve = run.curve("valid", name)
        if not curve:  # never defined: the AUC of rows that are all positives
            continue
        lower = name in ("log_loss", "average_loss")
        best = (min if lower else max)(curve, key=lambda point: point[1]) if name != "calibration" else curve[-1]
        word = "last" if name == "calibration" else "best"
        items.append((f"{best[1]:.4f}", f"{word} validation {TITLES.get(name, name)}, step {best[0]:.0f}"))
    if "best_auc" in run.data:
        items.append((f"{run.data['best_auc']:.4f}", "best AUC this data allows"))
    train = [row for row in run.rows if row.get("split") == "train"]
    if train:
        items.append((f"{train[-1]['step']:,}", "steps"))
        speed = [row["samples_per_second"] for row in train if row.get("samples_per_second")]
        if speed:
            items.append((short(sorted(speed)[len(speed) // 2]), "samples per second, median"))
    if run.data.get("rows"):
        items.append((short(float(run.data["rows"])), "training rows"))
    return html.part("cards", items)


def curves(run: RunRecord) -> str:
    """Loss, every validation measure, and the learning rate, over steps."""
    panels = [
        _panel(
            "Loss",
            line_chart(
                [
                    Line("training", run.curve("train", "loss")),
                    Line("validation", run.curve("valid", "loss") or run.curve("valid", "log_loss"), marks=True),
                ],
                x_label="step",
                y_label="loss",
            ),
        )
    ]
    for name in run.metric_names:
        if name == "log_loss":
            continue
        points = run.curve("valid", name)
        lines = [Line(f"validation {TITLES.get(name, name)}", points, marks=True, tone=1)]
        reach = run.data.get(f"best_{name}")
        if reach is not None and points:
            edge = [(0.0, float(reach)), (points[-1][0], float(reach))]
            lines.append(Line("best that this data allows", edge, dashed=True, tone=7))
        panels.append(_panel(TITLES.get(name, name), line_chart(lines, x_label="step", y_label=TITLES.get(name, name))))
    rate = run.curve("train", "lr")
    if rate:
        panels.append(_panel("Learning rate", line_chart([Line("lr", rate, tone=2)], x_label="step", y_label="lr")))
    return _section("How it learned", panels)


def calibration(run: RunRecord) -> str:
    """Mean label against mean prediction in bins, and the ratio of their sums, of the evaluation of the saved model."""
    bins = [one for one in run.histogram.get("bins", []) if one["count"] > 0]
    if not bins:
        return ""
    points = [(float(one["mean_prediction"]), float(one["mean_label"])) for one in bins]
    ideal = Line("perfectly calibrated", [(0.0, 0.0), (1.0, 1.0)], dashed=True, tone=7)
    chart = line_chart(
        [Line("this model", points, marks=True), ideal], x_label="mean prediction", y_label="mean label", square=True
    )
    counts = _rows_per_bin(bins)
    said, seen = (sum(float(one[name]) * one["count"] for one in bins) for name in ("mean_prediction", "mean_label"))
    ratio = f"; their sum is {said / seen:.3g} times that of the labels" if seen else ""
    return _section(
        "Calibration",
        [
            _panel("Predicted against seen", chart, f"Each dot is one bin of predictions{ratio}."),
            _panel("Rows per bin", bar_chart(counts, x_label="rows", log=True), "Named by the bin's mean prediction."),
        ],
    )


def _rows_per_bin(bins: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Join neighbouring bins so that at most MAX_BINS are left, each named by its rows' mean prediction."""
    together = -(-len(bins) // MAX_BINS)
    bars = []
    for start in range(0, len(bins), together):
        group = bins[start : start + together]
        count = sum(one["count"] for one in group)
        mean = sum(one["mean_prediction"] * one["count"] for one in group) / count
        bars.append((f"{mean:.3f}", float(count)))
    return bars


def data(run: RunRecord) -> str:
    """Cardinalities and how fast popularity falls with rank."""
    sizes = [(one.name, float(one.num_ids)) for one in run.schema.categorical if one.num_ids is not None]
    sizes.sort(key=lambda item: -item[1])
    if not sizes:
        return ""
    note = f"The {MAX_BARS} largest of {len(sizes)}." if len(sizes) > MAX_BARS else ""
    panels = [_panel("Ids per feature", bar_chart(sizes[:MAX_BARS], x_label="ids", log=True), note)]
    columns: dict[str, Any] = run.data.get("columns", {})
    lines: list[Line] = []
    for name, _ in sizes:
        points = _rank_counts(columns.get(name, {}).get("top_counts", []))
        if len(points) > 2 and len(lines) < MAX_CURVES:
            lines.append(Line(name, points))
    if lines:
        chart = line_chart(lines, x_label="rank of the id", y_label="rows", log_x=True, log_y=True, height=420)
        panels.append(_panel("Popularity", chart, "A straight line is a power law: few ids make up most rows."))
    table = _missing_table(columns)
    if table:
        panels.append(_panel("Missing and unknown", table))
    return _section("The data", panels)


def _rank_counts(counts: Sequence[Any]) -> list[tuple[float, float]]:
    """Accept [count, ...] by rank or [[rank, count], ...]."""
    if counts and isinstance(counts[0], list | tuple):
        return [(float(rank), float(count)) for rank, count in counts]
    return [(float(rank), float(count)) for rank, count in enumerate(counts, 1)]


def _missing_table(columns: dict[str, Any]) -> str:
    rows = [
        (name, float(info.get("num_missing", 0)), float(info.get("num_unknown", 0)))
        for name, info in columns.items()
        if info.get("num_missing") or info.get("num_unknown")
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: -(row[1] + row[2]))
    cells = [(name, f"{missing:,.0f}", f"{unknown:,.0f}") for name, missing, unknown in rows[:MAX_BARS]]
    return html.part("table", ("feature", "missing", "rare or unseen"), cells)


def stages(run: RunRecord) -> str:
    """Where the time went."""
    parts = [(name.replace("_", " "), float(value)) for name, value in run.stages.items() if _is_number(value)]
    if not parts:
        return ""
    return _section("Where the time went", [_panel("Seconds per stage", share_bar(parts, unit="s"), wide=True)])


def model(run: RunRecord, graph_svg: str) -> str:
    """The model's graph and the run's settings."""
    panels = []
    if graph_svg:
        panels.append(_panel("Graph", f'<div class="scroll">{graph_svg}</div>', wide=True))
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    panels.append(_panel("Settings", html.part("details", text), wide=True))
    columns = json.dumps(run.schema.to_dict(), indent=1, ensure_ascii=False)
    panels.append(_panel("Schema", html.part("details", columns), wide=True))
    return _section("The model", panels)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _panel(title: str, body: str, note: str = "", *, wide: bool = False) -> Markup:
    return html.part("panel", title, html.trusted(body), note, wide)


def _section(title: str, panels: Sequence[Markup]) -> Markup:
    return html.part("section", title, panels)
