"""The parts of the report, each a function from a run's record to HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from viviane.report import html
from viviane.report.chart import Line, bar_chart, line_chart, share_bar
from viviane.report.panels import Panel, section
from viviane.report.record import RunRecord
from viviane.report.scale import short

TITLES = {"auc": "AUC", "log_loss": "log loss", "calibration": "calibration", "accuracy": "accuracy"}
# One line a column would hide the others: the widest columns are the ones that matter for memory.
MAX_CURVES = 8
MAX_BARS = 40


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
    fits = run.machine.get("fits", [])
    if fits:
        items.append((duration(sum(float(fit["seconds"]) for fit in fits)), "total time"))
    if run.model_bytes:
        items.append((short_bytes(run.model_bytes), "saved model"))
    if run.data.get("rows"):
        items.append((short(float(run.data["rows"])), "training rows"))
    return str(html.part("cards", items))


def curves(run: RunRecord) -> str:
    """Loss, every validation measure, and the learning rate, over steps."""
    losses = [
        Line("training", run.curve("train", "loss"), marks=True),
        Line("validation", run.curve("valid", "loss") or run.curve("valid", "log_loss"), marks=True),
    ]
    panels = [_chart("Loss", losses, "loss")]
    for name in run.metric_names:
        if name == "log_loss":
            continue
        points = run.curve("valid", name)
        lines = [Line(f"validation {TITLES.get(name, name)}", points, marks=True, tone=1)]
        reach = run.data.get(f"best_{name}")
        if reach is not None and points:
            edge = [(0.0, float(reach)), (points[-1][0], float(reach))]
            lines.append(Line("best that this data allows", edge, dashed=True, tone=7))
        panels.append(_chart(TITLES.get(name, name), lines, TITLES.get(name, name)))
    rate = run.curve("train", "lr")
    if rate:
        panels.append(_chart("Learning rate", [Line("lr", rate, tone=2, marks=True)], "lr"))
    speed = run.curve("train", "samples_per_second")
    if speed:
        panels.append(_chart("Throughput", [Line("training", speed, tone=3, marks=True)], "samples per second"))
    return section("How it learned", panels)


def _chart(title: str, lines: list[Line], y_label: str) -> Panel:
    return Panel(title, lambda width: line_chart(lines, x_label="step", y_label=y_label, width=width))


def data(run: RunRecord) -> str:
    """Cardinalities and how fast popularity falls with rank."""
    sizes = [(one.name, float(one.num_ids)) for one in run.schema.categorical if one.num_ids is not None]
    sizes.sort(key=lambda item: -item[1])
    if not sizes:
        return ""
    note = f"The {MAX_BARS} largest of {len(sizes)}." if len(sizes) > MAX_BARS else ""
    bars = sizes[:MAX_BARS]
    panels = [Panel("Ids per feature", lambda width: bar_chart(bars, x_label="ids", log=True, width=width), note)]
    columns: dict[str, Any] = run.data.get("columns", {})
    lines: list[Line] = []
    for name, _ in sizes:
        points = _rank_counts(columns.get(name, {}).get("top_counts", []))
        if len(points) > 2 and len(lines) < MAX_CURVES:
            lines.append(Line(name, points))
    if lines:
        panels.append(
            Panel(
                "Popularity",
                lambda width: line_chart(
                    lines, x_label="rank of the id", y_label="rows", log_x=True, log_y=True, width=width, height=420
                ),
                "A straight line is a power law: few ids make up most rows.",
            )
        )
    table = _missing_table(columns, float(run.data.get("rows") or 0))
    if table:
        panels.append(Panel("Missing and unknown", table, wide=not lines and len(sizes) < 8))
    return section("The data", panels)


def _rank_counts(counts: Sequence[Any]) -> list[tuple[float, float]]:
    """Accept [count, ...] by rank or [[rank, count], ...]."""
    if counts and isinstance(counts[0], list | tuple):
        return [(float(rank), float(count)) for rank, count in counts]
    return [(float(rank), float(count)) for rank, count in enumerate(counts, 1)]


def _missing_table(columns: dict[str, Any], total: float) -> str:
    rows = [
        (name, float(info.get("num_missing", 0)), float(info.get("num_unknown", 0)))
        for name, info in columns.items()
        if info.get("num_missing") or info.get("num_unknown")
    ]
    if not rows:
        return ""
    rows.sort(key=lambda row: -(row[1] + row[2]))
    cells = [(name, _counted(missing, total), _counted(unknown, total)) for name, missing, unknown in rows[:MAX_BARS]]
    return str(html.part("table", ("feature", "missing", "rare or unseen"), cells))


def _counted(count: float, total: float) -> str:
    return f"{count:,.0f} ({count / total:.1%})" if total else f"{count:,.0f}"


def stages(run: RunRecord) -> str:
    """Where the time went."""
    parts = [(name.replace("_", " "), float(value)) for name, value in run.stages.items() if _is_number(value)]
    if not parts:
        return ""
    return section("Where the time went", [Panel("Seconds per stage", share_bar(parts, unit="s"), wide=True)])


def tiers(run: RunRecord) -> str:
    """Where the rows of tables larger than memory were, and what moved."""
    tables, counts = run.tiers.get("tables"), run.tiers.get("tiers")
    if not isinstance(tables, dict) or not isinstance(counts, dict):
        return ""
    placed = [
        (name, f"{one['rows']:,}", f"{one['rows_in_memory']:,} ({one['rows_in_memory'] / one['rows']:.1%})",
         short_bytes(one["memory_bytes"]), short_bytes(one["rows_on_disk"] * one["row_bytes"]))
        for name, one in tables.items()
    ]  # fmt: skip
    moved = [
        (name, f"{one['hits'] / max(1, one['hits'] + one['misses']):.1%}", f"{one['hits']:,}", f"{one['misses']:,}",
         short_bytes(one["bytes_read"]), short_bytes(one["bytes_written"]))
        for name, one in counts.items()
    ]  # fmt: skip
    head = ("table", "rows", "rows in memory", "memory", "on disk")
    return section("Tables in tiers", [
        Panel("Placement", str(html.part("table", head, placed)), wide=True),
        Panel("Hits and bytes", str(html.part("table", ("tier", "found", "hits", "misses", "read", "written"), moved)),
              wide=True),
    ])  # fmt: skip


def machine(run: RunRecord) -> str:
    """Where the run was made: machine, versions, start, time and memory of each fit."""
    if not run.machine:
        return ""
    rows = [("machine", str(run.machine.get("machine", "")))]
    versions: dict[str, str] = run.machine.get("versions", {})
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    for fit in run.machine.get("fits", []):
        text = f"{duration(float(fit['seconds']))}, begun {fit.get('started', 'at an unknown time')}"
        for key, what in (("peak_memory_bytes", "peak memory"), ("peak_gpu_memory_bytes", "on the GPU")):
            text += f", {what} {short_bytes(float(fit[key]))}" if fit.get(key) else ""
        rows.append(("fit", text))
    if run.model_bytes:
        rows.append(("saved model", short_bytes(run.model_bytes)))
    return section("Where it ran", [Panel("Machine", str(html.part("facts", rows)), wide=True)])


def duration(seconds: float) -> str:
    """Return seconds as text.

    Example:
        >>> duration(3.21), duration(75), duration(7384)
        ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def short_bytes(count: float) -> str:
    """Return a number of bytes as text.

    Example:
        >>> short_bytes(512), short_bytes(3 << 20)
        ('512 B', '3 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(max(count, 1), 1024)), len(units) - 1)
    return f"{count / 1024**power:.3g} {units[power]}"


def model(run: RunRecord, graph_svg: str) -> str:
    """The model's graph and the run's settings."""
    panels: list[Panel] = []
    if graph_svg:
        panels.append(Panel("Graph", f'<div class="scroll">{graph_svg}</div>', wide=True))
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    panels.append(Panel("Settings", str(html.part("details", text)), wide=True))
    columns = json.dumps(run.schema.to_dict(), indent=1, ensure_ascii=False)
    panels.append(Panel("Schema", str(html.part("details", columns)), wide=True))
    return section("The model", panels)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
