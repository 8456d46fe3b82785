"""Embedding rows by 64-bit key in memory, files and RocksDB, behind one batched contract.

Training keeps tables that are larger than device or host memory in tiers; serving keeps its parameter server there.
"""

from viviane.store.array import ArrayTier
from viviane.store.file import FileTier
from viviane.store.host import HostTier
from viviane.store.host_cache import HostCacheTier
from viviane.store.rocks import RocksTier
from viviane.store.rocks_database import RocksDatabase
from viviane.store.row_layout import Column, RowLayout
from viviane.store.sorted_runs import SortedRunTier
from viviane.store.statistics import LatencyHistogram, TierStats
from viviane.store.tier import Tier

__all__ = [
    "ArrayTier",
    "Column",
    "FileTier",
    "HostCacheTier",
    "HostTier",
    "LatencyHistogram",
    "RocksDatabase",
    "RocksTier",
    "RowLayout",
    "SortedRunTier",
    "Tier",
    "TierStats",
]
