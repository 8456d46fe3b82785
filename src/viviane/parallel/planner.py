"""Chooses the sharding plan with the least estimated step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import DynamicTableConfig, FeatureConfig
from viviane.ops.rules import rule_of
from viviane.parallel.costs import Cost, Machine, TableLoad, joint_milliseconds, part_cost, table_loads
from viviane.parallel.plan import AnyTable, Kind, ShardingPlan, TablePlan

_EXCHANGES = 4  # sizes, ids, vectors, gradients
_GOOD_BALANCE = 1.05
Sharding: TypeAlias = tuple[Kind, int]
"""The sharding type of a table and its number of shards; 0: one on every rank."""

_MEMORY_SHARE = 0.9  # of the memory, for tables: batches, gradients and dense layers need the rest
_UNEVEN = 1.1
"""Where rows may lie in tiers, a process gets at most this many times its even share of the bytes."""


@dataclass(frozen=True)
class Planned:
    """A sharding plan and its estimated cost.

    Args:
        plan: where the tables are.
        costs: by process, and of each table there.
        machine: the processes' device.
        num_widths: of rows, on the process that has most.
    """

    plan: ShardingPlan
    costs: tuple[Mapping[str, Cost], ...]
    machine: Machine
    num_widths: int = 1

    def total(self, rank: int) -> Cost:
        """Return the cost on one rank."""
        return sum(self.costs[rank].values(), Cost())

    @property
    def milliseconds(self) -> float:
        """Estimated time of lookups, exchange and updates in one step; see `joint_milliseconds`.

        Ids, vectors and gradients are exchanged where a table is not on every process, and gradients of rows are summed
        where one is; each exchange waits for all processes.
        """
        kinds = {one.kind for one in self.plan.tables}
        calls = _EXCHANGES * bool(kinds - {"replicated"}) + bool(kinds & {"replicated", "hybrid"})
        waits = calls * self.machine.call_ms if self.plan.world_size > 1 else 0.0
        apart = max(0, self.num_widths - 1) * self.machine.width_ms
        return waits + apart + joint_milliseconds(self._totals, self.machine)

    @property
    def _totals(self) -> list[Cost]:
        return [self.total(rank) for rank in range(self.plan.world_size)]

    @property
    def balance(self) -> float:
        """Mean time of the ranks divided by the time of the step: 1 is perfectly balanced."""
        times = [one.milliseconds(self.machine) for one in self._totals]
        together = joint_milliseconds(self._totals, self.machine)
        return sum(times) / len(times) / together if together else 1.0

    def words(self) -> str:
        """Describe the plan and its estimated time in one line."""
        where: dict[str, list[str]] = {}
        for one in self.plan.tables:
            hot = f" ({one.num_hot:,} hot rows)" if one.num_hot else ""
            count = f" over {len(one.ranks)}" if 1 < len(one.ranks) < self.plan.world_size else ""
            place = f"{one.kind}{count}{hot}" if len(one.ranks) != 1 else f"on {one.ranks[0]}"
            where.setdefault(place, []).append(one.table)
        listed = "; ".join(f"{place}: {', '.join(names)}" for place, names in where.items())
        return f"{listed}; expected {self.milliseconds:.2f} ms a step, balance {self.balance:.0%}"

    @property
    def fits(self) -> bool:
        """Whether the shards of every rank fit its memory."""
        limit = _MEMORY_SHARE * self.machine.memory_bytes
        return all(self.total(rank).held <= limit for rank in range(self.plan.world_size))


class Planner:
    """Finds the plan with the least estimated step time among those that fit.

    It begins with each table on one process, the small ones replicated where that is cheaper. Then it shards the
    largest table of the slowest or fullest process by columns or rows, as long as that helps; columns over 2, 4 and so
    on up to all processes, since what ids cost is paid in every part. Each sharding of the first table is followed to
    its end.

    Args:
        tables, features, optimizer: of the collection.
        batch_size: of the global batch.
        world_size: processes.
        machine: each one's device.
        hotness: mean ids a row of each feature; 1 where left out.
        hot_shares: by table, the share of lookups that this many first keys serve; "hybrid" is tried for these.
        wire_bytes: of a number on the wire.
        fixed: plans of single tables that stay as they are.
        kinds: of single tables, whose processes are still to be chosen.
        tiers: whether rows that do not fit the devices may lie in host memory or files. Tables that exceed the devices'
            memory are then planned as well: each process gets about the same bytes of them. Dynamic tables have to fit.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.embedding import TableConfig
        >>> tables = [TableConfig(name="user", num_rows=10**7, dim=32), TableConfig(name="day", num_rows=7, dim=32)]
        >>> features = [FeatureConfig(name="user", table="user"), FeatureConfig(name="day", table="day")]
        >>> machine = Machine(memory_bytes=8 * 10**9, memory_gb_per_s=20.0, link_gb_per_s=2.0)
        >>> found = Planner(tables, features, SGD(), 4096, 2, machine).best()
        >>> found.plan.table("day").kind, found.fits
        ('replicated', True)
    """

    def __init__(
        self,
        tables: Sequence[AnyTable],
        features: Sequence[FeatureConfig],
        optimizer: AnyOptimizer,
        batch_size: int,
        world_size: int,
        machine: Machine,
        *,
        hotness: Mapping[str, float] | None = None,
        hot_shares: Mapping[str, Mapping[int, float]] | None = None,
        wire_bytes: int = 4,
        fixed: Sequence[TablePlan] = (),
        kinds: Mapping[str, Kind] | None = None,
        tiers: bool = False,
    ) -> None:
        self.world_size = world_size
        self.wire_bytes = wire_bytes
        named = {table.name: table for table in tables}
        loads = table_loads(named, features, optimizer, batch_size, hotness or {}, hot_shares or {})
        self.loads = {load.table.name: load for load in loads}
        self.machine = _with_room(machine, loads, world_size) if tiers else machine
        self.fixed = {one.table: one for one in fixed}
        self.kinds = dict(kinds or {})
        for name in (*self.fixed, *self.kinds):
            if name not in self.loads:
                fix = suggest(name, self.loads)
                raise ConfigError("a plan is given for a table that is not there", value=name, fix=fix)
            if self.kinds.get(name) == "hybrid" and not self.loads[name].hot_share:
                raise ConfigError(
                    "which rows are hot is not known", where=f"plan of table {name!r}", value="hybrid",
                    fix="give a ShardingPlan with num_hot, or train on data with the ETL's statistics",
                )  # fmt: skip

    def best(self) -> Planned:
        """Return the plan.

        Raises:
            ConfigError: no plan fits into the processes' memory.
        """
        free = {name: load for name, load in self.loads.items() if name not in self.fixed}
        given: dict[str, Kind] = {name: self.kinds.get(name) or self._first_kind(load) for name, load in free.items()}
        kinds: dict[str, Sharding] = {name: (kind, int(kind == "table")) for name, kind in given.items()}
        first = self._place(kinds)
        found = [first]
        if not _is_good(first):
            moves = self._moves(kinds, first)
            # The first table is the one that counts most: what is best for it alone may leave less for the others.
            found += [self._descend(one.kinds, one.planned) for one in moves if one.table == moves[0].table]
        best = min(found, key=_rank)
        if not best.fits:
            raise ConfigError(
                "the tables do not fit", value=f"{sum(load.bytes for load in self.loads.values()) / 1e9:.1f} GB",
                allowed=f"{_MEMORY_SHARE * self.machine.memory_bytes * self.world_size / 1e9:.1f} GB on "
                f"{self.world_size} process(es), {_MEMORY_SHARE:.0%} of their memory",
                fix="use more processes, rows of 16 bits, or an optimizer with less state",
            )  # fmt: skip
        return best

    def evaluate(self, plan: ShardingPlan) -> Planned:
        """Return the cost of a given plan."""
        costs: list[dict[str, Cost]] = [{} for _ in range(self.world_size)]
        widths: list[set[tuple[float, str]]] = [set() for _ in range(self.world_size)]
        for one in plan.tables:
            cost, table = self._cost(one), self.loads[one.table].table
            parts = len(one.ranks) if one.kind == "column" else 1
            for rank in one.ranks or range(self.world_size):
                costs[rank][one.table] = cost
                if one.kind != "replicated":
                    widths[rank].add((table.dim / parts, table.dtype))
        return Planned(plan, tuple(costs), self.machine, max(len(some) for some in widths))

    def _cost(self, one: TablePlan) -> Cost:
        return self._part_cost(one.table, one.kind, max(1, len(one.ranks)), one.num_hot)

    def _part_cost(self, name: str, kind: Kind, num_ranks: int, num_hot: int = 0) -> Cost:
        cache = self.machine.cache_bytes
        return part_cost(self.loads[name], kind, num_ranks, self.world_size, self.wire_bytes, num_hot, cache)

    def _first_kind(self, load: TableLoad) -> Kind:
        if isinstance(load.table, DynamicTableConfig) or self.world_size == 1:
            return "table"
        alone, copied = (self._part_cost(load.table.name, kind, 1) for kind in ("table", "replicated"))
        # One process bears the first, all of them bear the second.
        cheaper = copied.milliseconds(self.machine) < alone.milliseconds(self.machine) / self.world_size
        return "replicated" if cheaper and load.bytes < 0.01 * self.machine.memory_bytes else "table"

    def _place(self, kinds: Mapping[str, Sharding]) -> Planned:
        """Place replicated tables on all ranks, then shards, the slowest first, on the rank with the least work."""
        every = tuple(range(self.world_size))
        plans = dict(self.fixed)
        for name, (kind, parts) in kinds.items():
            if kind == "hybrid":
                plans[name] = TablePlan(table=name, kind=kind, ranks=every, num_hot=self._num_hot(self.loads[name]))
            elif not parts:
                plans[name] = TablePlan(table=name, kind=kind, ranks=self._ranks(name, kind))
        given = self.evaluate(ShardingPlan(world_size=self.world_size, tables=tuple(plans.values())))
        totals = [given.total(rank) for rank in every]
        limit = _MEMORY_SHARE * self.machine.memory_bytes
        cost = {name: self._part_cost(name, kind, parts) for name, (kind, parts) in kinds.items() if parts}
        for name in sorted(cost, key=lambda name: -cost[name].milliseconds(self.machine)):

            def load(rank: int, own: Cost = cost[name]) -> tuple[bool, float, float, float, int]:
                after = totals[rank] + own
                together = joint_milliseconds([*totals[:rank], after, *totals[rank + 1 :]], self.machine)
                return after.held > limit, together, after.milliseconds(self.machine), after.held, rank

            kind, parts = kinds[name]
            ranks = tuple(sorted(sorted(every, key=load)[:parts]))
            for rank in ranks:
                totals[rank] += cost[name]
            plans[name] = TablePlan(table=name, kind=kind, ranks=ranks)
        ordered = tuple(plans[name] for name in self.loads)
        return self.evaluate(ShardingPlan(world_size=self.world_size, tables=ordered))

    def _ranks(self, name: str, kind: Kind) -> tuple[int, ...]:
        """Return the ranks of a sharded table: no more than it has rows or columns."""
        load = self.loads[name]
        most = {"replicated": 0, "row": load.num_rows, "column": load.table.dim}[kind]
        return tuple(range(min(self.world_size, most)))

    def _num_hot(self, load: TableLoad) -> int:
        """Return the cheapest number of replicated rows."""
        return min(load.hot_share, key=lambda hot: self._time(load, "hybrid", hot))

    def _time(self, load: TableLoad, kind: Kind, hot: int = 0) -> float:
        return self._part_cost(load.table.name, kind, self.world_size, hot).milliseconds(self.machine)

    def _descend(self, kinds: dict[str, Sharding], best: Planned) -> Planned:
        """Shard one table after another as long as that helps."""
        for _ in range(2 * len(kinds) + 1):
            if _is_good(best):
                break
            moves = self._moves(kinds, best)
            if not moves:
                break
            move = moves[0]
            helps = _rank(move.planned) < _rank(best) or (not best.fits and not move.planned.fits)
            if not helps:
                break
            kinds, best = move.kinds, move.planned
        return best

    def _moves(self, kinds: Mapping[str, Sharding], best: Planned) -> list[_Move]:
        """Shard one more table of the rank with the most bytes, else of the slowest one or the one that sends most.

        Returns:
            each way to do so, the best one first.
        """
        found: list[_Move] = []
        for name in self._heaviest(best):
            if name in kinds and name not in self.kinds and kinds[name][0] in ("table", "replicated"):
                for sharding in self._shardings(self.loads[name]):
                    changed = {**kinds, name: sharding}
                    found.append(_Move(name, changed, self._place(changed)))
        return sorted(found, key=lambda one: _rank(one.planned))

    def _heaviest(self, best: Planned) -> list[str]:
        """Return the most expensive tables of the slowest rank and of the rank that sends most."""
        keys: list[Callable[[Cost], float]] = [lambda cost: cost.held]
        if best.fits:
            keys = [lambda cost: cost.local_milliseconds(self.machine), lambda cost: cost.wire]
        names: dict[str, None] = {}
        for key in keys:
            worst = max(range(self.world_size), key=lambda rank: key(best.total(rank)))
            names |= dict.fromkeys(sorted(best.costs[worst], key=lambda name: -key(best.costs[worst][name]))[:4])
        return list(names)

    def _shardings(self, load: TableLoad) -> list[Sharding]:
        table, size = load.table, self.world_size
        if isinstance(table, DynamicTableConfig) or size == 1:
            return []
        shardings: list[Sharding] = []
        if table.num_rows >= size:
            shardings.append(("row", 0))
        if load.hot_share and min(load.hot_share) + size <= table.num_rows:
            shardings.append(("hybrid", 0))
        if load.rule is not None and rule_of(load.rule).needs_whole_rows:
            return shardings
        halves = [parts for parts in (2 << i for i in range(size.bit_length())) if parts < size]
        return [*shardings, *(("column", parts) for parts in (*halves, size) if table.dim >= 4 * parts)]


class _Move(NamedTuple):
    """A table that is sharded, the kinds of all tables then, and their plan."""

    table: str
    kinds: dict[str, Sharding]
    planned: Planned


def _rank(planned: Planned) -> tuple[bool, float]:
    return not planned.fits, planned.milliseconds


def _is_good(planned: Planned) -> bool:
    return planned.fits and planned.balance * _GOOD_BALANCE >= 1


def _with_room(machine: Machine, loads: Sequence[TableLoad], world_size: int) -> Machine:
    """Return a machine that takes an even share of all tables, if its own memory takes that of the dynamic ones."""
    every = sum(load.bytes for load in loads)
    dynamic = sum(load.bytes for load in loads if isinstance(load.table, DynamicTableConfig))
    if dynamic > _MEMORY_SHARE * machine.memory_bytes * world_size:
        return machine
    even = int(_UNEVEN * every / world_size / _MEMORY_SHARE)
    return replace(machine, memory_bytes=max(machine.memory_bytes, even))
