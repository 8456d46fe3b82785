"""Every kind of tier, as tests open it; rows that say which key and version they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from viviane.store import (
    ArrayTier,
    Column,
    FileTier,
    HostCacheTier,
    HostTier,
    RocksDatabase,
    RocksTier,
    RowLayout,
    SortedRunTier,
    Tier,
)

LAYOUT = RowLayout([Column("weight", "float32", 3), Column("sum", "float32", 3)])
NUM_IDS = 64


def rows_of(keys: np.ndarray, version: int, layout: RowLayout = LAYOUT) -> np.ndarray:
    """Rows that certify themselves: every 8 bytes are a mix of key, version and place."""
    words = layout.row_bytes // 8
    mixed = keys[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(version)
    mixed = mixed * np.uint64(0xBF58476D1CE4E5B9) + np.arange(words, dtype=np.uint64)
    return np.ascontiguousarray(mixed).view(np.uint8).reshape(len(keys), layout.row_bytes)


def _rocks(folder: Path) -> Tier:
    tier = RocksTier(RocksDatabase(folder / "db"), "t", LAYOUT)
    close = tier.close

    def close_all() -> None:
        close()
        tier.database.close()

    tier.close = close_all  # type: ignore[method-assign]
    return tier


OPENERS: dict[str, Callable[[Path], Tier]] = {
    "array": lambda folder: ArrayTier(LAYOUT, NUM_IDS),
    "host cache": lambda folder: HostCacheTier(FileTier(folder / "file", LAYOUT, NUM_IDS), NUM_IDS, max_rows=7),
    "host": lambda folder: HostTier(LAYOUT, max_rows=1000),
    "file": lambda folder: FileTier(folder / "file", LAYOUT, NUM_IDS),
    "sorted runs": lambda folder: SortedRunTier(folder / "runs", LAYOUT, memory_rows=12, most_runs=2),
    "rocksdb": _rocks,
}
SURVIVORS = ("file", "host cache", "sorted runs", "rocksdb")
