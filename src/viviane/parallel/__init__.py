"""Embedding tables over several processes: plans, shards, and the exchange between them."""

from viviane.parallel.collection import ShardedCollection
from viviane.parallel.group import Group
from viviane.parallel.plan import Plan, Shard, TablePlan, replicate, shards_of

__all__ = ["Group", "Plan", "Shard", "ShardedCollection", "TablePlan", "replicate", "shards_of"]
