"""The plan of a model's tables: given whole, by kinds of some tables, or all of it found by the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

import torch

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.core.logging import get_logger
from viviane.embedding import CacheSettings, EmbeddingCollection, FeatureConfig, TableCollection
from viviane.parallel.collection import ShardedCollection
from viviane.parallel.group import Group
from viviane.parallel.measure import measure_machine
from viviane.parallel.plan import AnyTable, Kind, ShardingPlan
from viviane.parallel.planner import Planned, Planner

GivenPlan: TypeAlias = str | Mapping[str, Any]
BATCH_SIZE: Final = 8192
"""Rows of the global batch that a plan is made for if their number is not given."""
_log = get_logger("parallel")


@dataclass(frozen=True)
class Traffic:
    """How often columns are looked up, from the statistics that the ETL leaves with a data set (`Dataset.info`).

    Args:
        hotness: mean number of ids a row, by column; 1 where it is left out.
        hot_shares: by column, the share of its ids that are below a number.

    Example:
        >>> counts = {"num_values": 30, "num_missing": 0, "num_unknown": 0, "top_counts": [[1, 20], [2, 10]]}
        >>> found = Traffic.of({"rows": 10, "columns": {"seen": counts}})
        >>> found.hotness["seen"], found.hot_shares["seen"]
        (3.0, {})
    """

    hotness: Mapping[str, float] = field(default_factory=dict)
    hot_shares: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Traffic:
        """Read what `Dataset.info` holds; nothing where it has no statistics of columns."""
        rows, columns = info.get("rows") or 0, info.get("columns") or {}
        columns = {name: one for name, one in columns.items() if "num_values" in one}  # generated data has others
        if not rows:
            return cls()
        hotness = {name: one["num_values"] / rows for name, one in columns.items()}
        return cls(hotness, {name: _hot_shares(one) for name, one in columns.items()})


_HOT_ROWS: Final = (1_000, 10_000, 100_000)
_RESERVED: Final = 3  # ids without a value, before the frequent ones


def _hot_shares(counts: Mapping[str, Any]) -> dict[int, float]:
    """Return the shares of a column's ids that numbers of first keys serve.

    Counts are given at ranks spaced evenly on a logarithmic scale; between two of them they fall as a power law does,
    of which the trapezoid of the larger count and the smaller one is an estimate from above, the smaller one alone one
    from below. The mean of both is taken.
    """
    told, total = counts.get("top_counts") or [], counts["num_values"]
    served, found, last = 0.0, {}, (0, told[0][1] if told else 0)
    for rank, count in told:
        served += (rank - last[0]) * (0.25 * last[1] + 0.75 * count)
        last = rank, count
        for hot in _HOT_ROWS:
            if rank >= hot and hot + _RESERVED not in found and hot < told[-1][0]:
                found[hot + _RESERVED] = min(1.0, served / max(1, total))
    return found


def choose_plan(
    tables: Sequence[AnyTable],
    features: Sequence[FeatureConfig],
    optimizer: AnyOptimizer,
    group: Group,
    *,
    device: str = "cpu",
    batch_size: int | None = None,
    wire_dtype: str = "float32",
    traffic: Traffic | None = None,
    kinds: Mapping[str, str] | None = None,
    tiers: bool = False,
) -> Planned:
    """Find the plan with the least expected time on the machine that the processes run on; all call it together.

    Memory, its speed and that of the exchange are measured, and rank 0's figures count. They are rounded to powers of
    two, so that two starts of a job come to the same plan.

    Args:
        tables, features, optimizer: of all collections that train together.
        group: the processes.
        device: of each.
        batch_size: of the global batch; None takes `BATCH_SIZE`.
        wire_dtype: type of vectors and gradients between processes.
        traffic: how often columns are looked up; without it every feature has one id a row, all equally often.
        kinds: of single tables.
        tiers: whether rows that do not fit the devices may lie in host memory or files.

    Raises:
        ConfigError: a kind of a table that is not there, no such kind, or no plan fits into the memory.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.embedding import TableConfig
        >>> table, feature = TableConfig(name="day", num_rows=7, dim=4), FeatureConfig(name="day", table="day")
        >>> choose_plan([table], [feature], SGD(), Group()).plan.table("day").kind
        'table'
    """
    for name, kind in (kinds or {}).items():
        if kind not in get_args(Kind):
            allowed = ", ".join(get_args(Kind))
            raise ConfigError("no such kind", where=f"plan of table {name!r}", value=kind, allowed=allowed)
    seen = traffic or Traffic()
    machine = measure_machine(group, torch.device(device))
    planner = Planner(
        tables, features, optimizer, batch_size or BATCH_SIZE, group.size, machine,
        hotness=hotness_of(features, seen), hot_shares=hot_shares_of(features, seen),
        wire_bytes=getattr(torch, wire_dtype).itemsize,
        kinds=dict(kinds or {}),  # type: ignore[arg-type]  # checked above
        tiers=tiers,
    )  # fmt: skip
    planned = planner.best()
    if group.rank == 0:
        _log.info("plan of the tables: %s", planned.words())
    return planned


def hotness_of(features: Sequence[FeatureConfig], traffic: Traffic) -> dict[str, float]:
    """Return the mean number of ids a row of each feature whose column is known; its name may begin with a node's."""
    columns = {one.name: one.name.rpartition(".")[2] for one in features}
    return {name: traffic.hotness[column] for name, column in columns.items() if column in traffic.hotness}


def hot_shares_of(features: Sequence[FeatureConfig], traffic: Traffic) -> dict[str, Mapping[int, float]]:
    """Return hot shares of the tables that one column alone looks up: of several, whose keys are hot is not known."""
    users: dict[str, list[str]] = {}
    for one in features:
        users.setdefault(one.table, []).append(one.name.rpartition(".")[2])
    shares = {table: traffic.hot_shares.get(own[0], {}) for table, own in users.items() if len(own) == 1}
    return {table: share for table, share in shares.items() if share}


def is_whole(given: GivenPlan | None) -> bool:
    """Return whether `Solver.plan` is a whole plan."""
    return isinstance(given, Mapping) and "world_size" in given


def own_plan(given: Mapping[str, Any], tables: Sequence[AnyTable], name: str, world_size: int) -> ShardingPlan:
    """Return the part of a whole plan that is a collection's; an entry "<name>.<table>" goes before one "<table>".

    Raises:
        ConfigError: the plan lacks a table, or is for another number of processes.
    """
    names = {table.name for table in tables}
    plan = ShardingPlan.from_dict(dict(given), where="solver.plan")
    entries = {one.table: one for one in plan.tables if one.table in names}
    entries |= {
        table: one.model_copy(update={"table": table})
        for one in plan.tables
        if (table := one.table.removeprefix(f"{name}.")) in names and one.table != table
    }
    own = ShardingPlan(world_size=plan.world_size, tables=tuple(entries.values()))
    own.check({table.name: table for table in tables}, world_size)
    return own


def own_kinds(given: GivenPlan, tables: Sequence[AnyTable], name: str) -> dict[str, str]:
    """Return the kinds that `Solver.plan` gives to a collection's tables, "<name>.<table>" before "<table>"."""
    if isinstance(given, str):
        return {}
    names = {table.name for table in tables}
    kinds = {table: kind for table, kind in given.items() if table in names}
    full = {table.removeprefix(f"{name}."): kind for table, kind in given.items() if table not in names}
    return kinds | {table: kind for table, kind in full.items() if table in names}


def check_plan_names(given: GivenPlan, tables: Sequence[str]) -> None:
    """Refuse a `Solver.plan` that speaks of a table which is in no collection of a model.

    Raises:
        ConfigError: naming the table and the nearest one.
    """
    if isinstance(given, str):
        return
    names = [one["table"] for one in given["tables"]] if is_whole(given) else list(given)
    for name in names:
        if name not in tables:
            fix = suggest(name, tables)
            raise ConfigError("the plan names a table that is not there", where="solver.plan", value=name, fix=fix)


def make_tables(
    tables: Sequence[AnyTable],
    features: Sequence[FeatureConfig],
    optimizer: AnyOptimizer,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    group: Group | None = None,
    plan: GivenPlan = "auto",
    wire_dtype: str = "float32",
    name: str = "",
    batch_size: int | None = None,
    traffic: Traffic | None = None,
    deduplicate_ids: bool = False,
    cache: CacheSettings | None = None,
) -> TableCollection:
    """Return the collection for a group: spread over its processes, or an ordinary one in a process alone.

    Args:
        tables, features, optimizer, device, seed: as of an EmbeddingCollection.
        group: the processes; None: this one alone.
        plan: `Solver.plan`: "auto", kinds of some tables by name, or a whole plan; it may speak of other collections'
            tables too.
        wire_dtype: type of vectors and gradients between processes.
        name: of the collection: a plan of "<name>.<table>" goes before one of "<table>".
        batch_size, traffic: see `choose_plan`.
        deduplicate_ids: as of a ShardedCollection.
        cache: as of an EmbeddingCollection; memory is that of each process.
    """
    together = group or Group()
    # A plan for other processes is refused in one process too.
    found = own_plan(plan, tables, name, together.size) if isinstance(plan, Mapping) and is_whole(plan) else None
    if together.size == 1:
        return EmbeddingCollection(tables, features, optimizer, device=device, seed=seed, cache=cache)
    if found is None:
        found = choose_plan(
            tables, features, optimizer, together, device=str(device), batch_size=batch_size, wire_dtype=wire_dtype,
            traffic=traffic, kinds=own_kinds(plan, tables, name),
        ).plan  # fmt: skip
    return ShardedCollection(
        tables, features, optimizer, plan=found, group=together, device=device, seed=seed,
        wire_dtype=getattr(torch, wire_dtype), deduplicate_ids=deduplicate_ids, cache=cache,
    )  # fmt: skip
