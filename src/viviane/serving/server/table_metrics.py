"""What tables in tiers have done, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from viviane.core.optional import require

_TIER_COUNTS: Final = (
    ("hits", "hits", "Keys that a tier had."),
    ("misses", "misses", "Keys that a tier had not."),
    ("skipped", "skipped", "Keys that a tier was not asked for because it failed."),
    ("bytes_read", "read_bytes", "Bytes of rows that were read."),
    ("bytes_written", "written_bytes", "Bytes of rows that were written."),
    ("failures", "failures", "Calls of a tier that failed."),
    ("damaged", "damaged", "Rows whose checksum differed."),
)
_TABLE_COUNTS: Final = (
    ("degraded", "Keys whose answer may not be the newest row, or is the default, because a tier failed."),
    ("deferred", "Keys that read the default since the hit rate was good enough."),
    ("defaults", "Keys that no tier had."),
)
_UPDATE_COUNTS: Final = (
    ("deltas", "Deltas that were applied."), ("rows", "Rows that updates have changed."),
    ("repeated", "Deltas that came again."), ("repaired", "Deltas that were taken from the outbox."),
    ("refused", "Messages that are no deltas of this model."),
)  # fmt: skip


class TableMetrics:
    """Reads the counts of tables at the moment when the metrics are read.

    Args:
        tables: returns the status of the tables of each model and version.
    """

    def __init__(self, tables: Callable[[], dict[tuple[str, int], dict[str, Any]]]) -> None:
        self._tables = tables

    def collect(self) -> Iterable[Any]:
        """Yield the families."""
        core = require("prometheus_client.core", extra="serving", purpose="metrics of a server")
        found = self._tables()
        yield from self._of_tiers(core, found)
        for name, text in _TABLE_COUNTS:
            family = core.CounterMetricFamily(f"viviane_table_{name}", text, labels=["model", "version", "table"])
            for (model, version), status in found.items():
                for table in status["tables"]:
                    family.add_metric([model, str(version), table["table"]], table[name])
            yield family
        yield from self._of_updates(core, found)

    @staticmethod
    def _of_tiers(core: Any, found: dict[tuple[str, int], dict[str, Any]]) -> Iterable[Any]:
        labels = ["model", "version", "table", "tier"]
        rows = [
            ([model, str(version), table["table"], tier["tier"]], tier)
            for (model, version), status in found.items()
            for table in status["tables"]
            for tier in table["tiers"]
        ]
        for key, name, text in _TIER_COUNTS:
            family = core.CounterMetricFamily(f"viviane_tier_{name}", text, labels=labels)
            for names, tier in rows:
                family.add_metric(names, tier[key])
            yield family
        available = core.GaugeMetricFamily("viviane_tier_available", "Whether a tier is read.", labels=labels)
        seconds = core.GaugeMetricFamily(
            "viviane_tier_fetch_seconds", "Durations of a tier's lookups.", labels=[*labels, "quantile"]
        )
        for names, tier in rows:
            available.add_metric(names, int(tier["available"]))
            for percent in (50, 99):
                seconds.add_metric([*names, f"0.{percent}"], tier[f"fetch_p{percent}_ms"] / 1000)
        yield available
        yield seconds

    @staticmethod
    def _of_updates(core: Any, found: dict[tuple[str, int], dict[str, Any]]) -> Iterable[Any]:
        labels = ["model", "version"]
        rows = [([model, str(version)], status["updates"]) for (model, version), status in found.items()
                if status["updates"] is not None]  # fmt: skip
        for name, text in _UPDATE_COUNTS:
            family = core.CounterMetricFamily(f"viviane_update_{name}", text, labels=labels)
            for names, updates in rows:
                family.add_metric(names, updates[name])
            yield family
        for name, key, text in (
            ("staleness_seconds", "staleness_s", "Age of the newest delta when it was applied."),
            ("publication", "publication", "The last publication that is complete."),
            ("gaps", "gaps", "Partitions that are blocked because a delta is missing."),
            ("connected", "connected", "Whether the brokers are connected."),
        ):
            family = core.GaugeMetricFamily(f"viviane_update_{name}", text, labels=labels)
            for names, updates in rows:
                value = updates[key]
                family.add_metric(names, len(value) if isinstance(value, list) else float(value))
            yield family
