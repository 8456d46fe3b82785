"""Embedding tables over several processes: plans, shards, and the exchange between them."""

from viviane.parallel.automatic import Traffic, check_plan_names, choose_plan, make_tables
from viviane.parallel.collection import ShardedCollection
from viviane.parallel.group import Group
from viviane.parallel.plan import Plan, Shard, TablePlan, replicate, shards_of
from viviane.parallel.start import join_processes, num_restarts

__all__ = [
    "Group",
    "Plan",
    "Shard",
    "ShardedCollection",
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
