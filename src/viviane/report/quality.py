"""The parts of the report on predictions: curves, balance of labels, calibration, importance of columns."""

from __future__ import annotations

from typing import Any

from viviane.report import html
from viviane.report.chart import Line, bar_chart, line_chart
from viviane.report.panels import Panel, section
from viviane.report.record import RunRecord

MAX_BARS = 40
MAX_BINS = 20
MAX_CURVES = 8


def separation(run: RunRecord) -> str:
    """ROC and precision-recall curves of each binary label at the last evaluation, and the balance of labels."""
    curves = {name: one for name, one in run.histogram.get("curves", {}).items() if one.get("rows")}
    shown = {name: one for name, one in list(curves.items())[:MAX_CURVES] if one.get("roc")}
    panels = []
    if shown:
        panels += [_roc(shown), _precision_recall(shown)]
    if curves:
        rows = []
        for name, one in curves.items():
            positives, total = float(one["positives"]), float(one["rows"])
            rows.append((name, f"{total:,.0f}", f"{positives:,.0f}", f"{positives / total:.3%}"))
        table = html.part("table", ("label", "validation rows", "positives", "share"), rows)
        panels.append(Panel("Balance of labels", str(table), "A guess predicts the share.", wide=True))
    return section("How well it tells rows apart", panels)


def _roc(curves: dict[str, Any]) -> Panel:
    lines = [Line(name, [(x, y) for x, y in one["roc"]]) for name, one in curves.items()]
    lines.append(Line("a guess", [(0.0, 0.0), (1.0, 1.0)], dashed=True, tone=7))
    x_label, y_label = "share of negatives above the threshold", "share of positives above it"
    return Panel(
        "ROC curve",
        lambda width: line_chart(lines, x_label=x_label, y_label=y_label, square=True, width=width),
        "The area below it is the AUC.",
    )


def _precision_recall(curves: dict[str, Any]) -> Panel:
    lines = []
    for tone, (name, one) in enumerate(curves.items()):
        share = float(one["positives"]) / float(one["rows"])
        lines.append(Line(name, [(x, y) for x, y in one["pr"]], tone=tone % 8))
        lines.append(Line(f"a guess, {name}", [(0.0, share), (1.0, share)], dashed=True, tone=7))
    return Panel(
        "Precision and recall",
        lambda width: line_chart(lines, x_label="recall", y_label="precision", square=True, width=width),
        "Precision: share of positives above a threshold. Recall: share of all positives that are there.",
    )


def calibration(run: RunRecord) -> str:
    """Mean label against mean prediction in bins, and the ratio of their sums, of the evaluation of the saved model."""
    bins = [one for one in run.histogram.get("bins", []) if one["count"] > 0 and one["mean_prediction"] is not None]
    if not bins:
        return ""
    points = [(float(one["mean_prediction"]), float(one["mean_label"])) for one in bins]
    ideal = Line("perfectly calibrated", [(0.0, 0.0), (1.0, 1.0)], dashed=True, tone=7)
    model = Line("this model", points, marks=True)
    counts = rows_per_bin(bins)
    said, seen = (sum(float(one[name]) * one["count"] for one in bins) for name in ("mean_prediction", "mean_label"))
    ratio = f"; their sum is {said / seen:.3g} times that of the labels" if seen else ""
    return section(
        "Calibration",
        [
            Panel(
                "Predicted against seen",
                lambda width: line_chart(
                    [model, ideal], x_label="mean prediction", y_label="mean label", square=True, width=width
                ),
                f"Each dot is one bin of predictions{ratio}.",
            ),
            Panel(
                "Rows per bin",
                lambda width: bar_chart(counts, x_label="rows", log=True, width=width, share=True),
                "Named by the bin's mean prediction.",
            ),
        ],
    )


def rows_per_bin(bins: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Join neighbouring bins so that at most MAX_BINS are left, each named by its rows' mean prediction."""
    together = -(-len(bins) // MAX_BINS)
    bars = []
    for start in range(0, len(bins), together):
        group = bins[start : start + together]
        count = sum(one["count"] for one in group)
        mean = sum(one["mean_prediction"] * one["count"] for one in group) / count
        bars.append((f"{mean:.3f}", float(count)))
    return bars


def importance(run: RunRecord) -> str:
    """Increase of the log loss when the values of a column are shuffled between validation rows."""
    found = run.importance
    features = found.get("features", [])
    if not features:
        return ""
    bars = [(str(one["name"]), max(float(one["log_loss"]), 0.0)) for one in features[:MAX_BARS]]
    what = f"over {found['rows']:,} validation rows, label {found['label']}; it is {found['log_loss']:.4f} before"
    note = (
        f"Increase of the log loss when the column is shuffled, {what}. Of columns that say the same each gets little."
    )
    if len(features) > MAX_BARS:
        note = f"The {MAX_BARS} largest of {len(features)}. {note}"
    panel = Panel("Importance of columns", lambda width: bar_chart(bars, x_label="log loss", width=width), note)
    return section("What it looks at", [panel])
