"""What the tiers of a module's tables have counted, for the progress line and the report."""

from __future__ import annotations

from typing import Any

from torch import nn

from viviane.store import TierStats
from viviane.training.passes import tiered_storages


def tier_counts(module: nn.Module) -> dict[str, Any]:
    """Return tables in tiers with their place, and hits and bytes by tier; empty where all tables are in memory.

    The tier "memory" counts lookups of training, evaluation and passes. Bytes of files include those of checkpoints.
    """
    tiers: dict[str, TierStats] = {}
    tables: dict[str, dict[str, int]] = {}
    for storage in tiered_storages(module):
        for name, stats in storage.tier_stats().items():
            tiers[name] = tiers.get(name, TierStats()).plus(stats)
        for name, one in storage.tiered_tables().items():
            own = {"rows": one.num_rows, "rows_in_memory": one.rows_in_memory,
                   "memory_bytes": one.rows_in_memory * one.slot_bytes, "rows_on_disk": one.tier.num_rows(),
                   "row_bytes": one.tier.layout.row_bytes}  # fmt: skip
            shown = name if name not in tables else f"{name} (dim {storage.dim})"
            tables[shown] = own
    if not tiers:
        return {}
    kept = ("hits", "misses", "rows_read", "rows_written", "bytes_read", "bytes_written")
    counts = {name: {one: getattr(stats, one) for one in kept} for name, stats in tiers.items()}
    return {"tables": tables, "tiers": counts}


def hits_text(module: nn.Module) -> str:
    """Return the share of rows that lookups found in memory, for a progress line; empty without tiers."""
    memory = TierStats()
    storages = tiered_storages(module)
    for storage in storages:
        memory = memory.plus(storage.tier_stats()["memory"])
    return f", {memory.hit_rate:.1%} of rows in memory" if storages else ""
