"""Conversion of HugeCTR's plan of an embedding collection to a Viviane sharding plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viviane.compat.hugectr.arguments import note, say
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Slot
from viviane.parallel.plan import ShardingPlan, TablePlan


def plan_of(
    collections: Sequence[EmbeddingCollectionConfig], slots: Sequence[Slot], processes: int, *, has_others: bool
) -> dict[str, Any] | None:
    """Return the plan of `shard`, or None if the number of processes differs from its GPUs.

        "dp"                on every process            replicated
        "mp"                on one process              whole
                            on several                  key k on process k mod n of them
        "mp", (name, k)     on several                  columns, one part per process
        max_vocabulary_size=-1                          whole, on the first named process

    Args:
        collections: collections of a model.
        slots: slots with tables; slots without sizes are dynamic.
        processes: number of processes that train together.
        has_others: the model has embeddings of the older kind, which no plan contains: then there is no plan.
    """
    matrices = [one.shard_matrix for one in collections]
    if processes == 1 or has_others or not matrices or any(one is None or len(one) != processes for one in matrices):
        if any(matrices):
            note("EmbeddingCollectionConfig", "shard")
        return None
    dynamic = {slot.table for slot in slots if slot.size is None}
    tables = [_place(one, name, dynamic) for one in collections for name in one.tables]
    found = [table for table in tables if table is not None]
    if len(found) < len(tables):
        note("EmbeddingCollectionConfig", "shard: it does not contain all tables, so it is ignored")
        return None
    say(f"Tables are sharded over {processes} processes by shard: "
        + ", ".join(f"{one.table} {one.kind} {list(one.ranks) or 'everywhere'}" for one in found))  # fmt: skip
    return ShardingPlan(world_size=processes, tables=tuple(found)).to_dict()


def _place(collection: EmbeddingCollectionConfig, name: str, dynamic: set[str]) -> TablePlan | None:
    matrix = collection.shard_matrix or []
    ranks = tuple(rank for rank, names in enumerate(matrix) if name in names)
    if not ranks:
        return None
    kind, parts = collection.strategy_of(name)
    if name in dynamic or len(ranks) == 1:
        return TablePlan(table=name, kind="table", ranks=ranks[:1])
    if kind == "dp":
        return TablePlan(table=name, kind="replicated")
    if parts > 1:
        return TablePlan(table=name, kind="column", ranks=ranks[: collection.tables[name].ev_size])
    if (collection.tables[name].size or 0) < len(ranks):
        return TablePlan(table=name, kind="table", ranks=ranks[:1])
    return TablePlan(table=name, kind="row", ranks=ranks)
