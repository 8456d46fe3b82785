"""Embedding tables over several processes: plans, shards, and the exchange between them."""

import warnings
from typing import Any

from viviane.parallel.automatic import Traffic, check_plan_names, choose_plan, make_tables
from viviane.parallel.collection import ShardedCollection
from viviane.parallel.group import Group
from viviane.parallel.plan import Shard, ShardingPlan, TablePlan, replicate, shards_of
from viviane.parallel.start import join_processes, num_restarts

__all__ = [
    "Group",
    "Shard",
    "ShardedCollection",
    "ShardingPlan",
    "TablePlan",
    "Traffic",
    "check_plan_names",
    "choose_plan",
    "join_processes",
    "make_tables",
    "num_restarts",
    "replicate",
    "shards_of",
]


def __getattr__(name: str) -> Any:
    """Return `ShardingPlan` under its old, deprecated name."""
    if name != "Plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.Plan is now ShardingPlan", DeprecationWarning, stacklevel=2)
    return ShardingPlan
