"""What a table costs on a process, by the kind of its plan: bytes held, bytes read and written, bytes on the wire.

Shapes: n processes, B rows of the global batch, N lookups in a table (B times the ids a row has), V vectors returned
(B for each place of the output), R rows, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from viviane.config.optimizers import AnyOptimizer
from viviane.embedding import DynamicTableConfig, FeatureConfig
from viviane.ops.row_update import state_row_bytes
from viviane.parallel.plan import AnyTable, Kind

_ID_BYTES = 4
_DYNAMIC_INDEX_BYTES = 64
_ID_OF_OTHERS = 0.5
"""What an id costs beside its bytes where its row is another part's, of one whose row is found: it is sorted, but
neither read nor updated. Without it four H200 got 100 ids a row of 40 M rows by columns over two: 3.51 ms instead of
3.34 for DLRM-DCNv2 at 32,768 rows."""


@dataclass(frozen=True)
class Machine:
    """A process's device.

    Args:
        memory_bytes: that tables may take.
        memory_gb_per_s: bytes read plus written per nanosecond.
        link_gb_per_s: bytes sent to other processes per nanosecond, while as many come in.
        row_ns: of each looked-up row beside its bytes: finding it, its equals, its place among the gradients.
        call_ms: of an exchange beside its bytes.
        sum_ratio: what a byte that is summed over the processes costs, of one that is only sent. Over NVLink no more
            (2 H200, 32 MiB: a sum sends 32 MiB in 137 us, an exchange of all with all 16 MiB in 81 us). Gloo receives,
            adds and sends on in turn, and takes about twice as long for a byte as its exchange does.
        shares_link: whether all processes send through one memory, so that what counts is what they send together.
        cache_bytes: of rows or gradients that are read again from a cache once they were read.
        width_ms: of each further width of rows on a process, which are looked up, sorted and updated apart.
    """

    memory_bytes: int
    memory_gb_per_s: float
    link_gb_per_s: float
    row_ns: float = 0.0
    call_ms: float = 0.0
    sum_ratio: float = 1.0
    shares_link: bool = False
    cache_bytes: int = 0
    width_ms: float = 0.0


@dataclass(frozen=True)
class TableLoad:
    """What one iteration asks of a table.

    Args:
        table: its settings.
        rule: that trains it, or None.
        lookups: N of the global batch.
        vectors: V of the global batch.
        hot_share: by number of hot rows, the share of lookups that they serve; empty where it is not known.
    """

    table: AnyTable
    rule: AnyOptimizer | None
    lookups: float
    vectors: float
    hot_share: Mapping[int, float]

    @property
    def num_rows(self) -> int:
        """R; of a dynamic table as many as it begins with."""
        if isinstance(self.table, DynamicTableConfig):
            return self.table.initial_capacity
        return self.table.num_rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.table.dim * self.table.torch_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's optimizer state."""
        return state_row_bytes(self.rule, self.table.dim)

    @property
    def bytes(self) -> int:
        """Bytes of the whole table on the devices: of a dynamic one whose rows lie elsewhere, those of its keys."""
        row_bytes = self.row_bytes + self.state_bytes
        if not isinstance(self.table, DynamicTableConfig):
            return self.num_rows * row_bytes
        rows = {"device": self.num_rows, "split": min(self.num_rows, self.table.device_rows or 0)}
        return rows.get(self.table.memory, 0) * row_bytes + self.num_rows * _DYNAMIC_INDEX_BYTES


@dataclass(frozen=True)
class Cost:
    """Of a part of a table on one process.

    Args:
        held: bytes.
        memory: bytes moved in an iteration.
        wire: bytes sent in exchanges of ids, vectors and gradients.
        rows: looked up; each costs what it does beside its bytes in every part that looks it up.
        sums: bytes sent for gradients that are summed over the processes.
    """

    held: float = 0.0
    memory: float = 0.0
    wire: float = 0.0
    rows: float = 0.0
    sums: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        wire, rows = self.wire + other.wire, self.rows + other.rows
        return Cost(self.held + other.held, self.memory + other.memory, wire, rows, self.sums + other.sums)

    def milliseconds(self, machine: Machine) -> float:
        """Return the time of an iteration, nothing overlapped."""
        return joint_milliseconds([self], machine)

    def local_milliseconds(self, machine: Machine) -> float:
        """Return the time of lookups and updates, without the exchange."""
        return (self.memory / machine.memory_gb_per_s + self.rows * machine.row_ns) / 1e6


def joint_milliseconds(costs: Sequence[Cost], machine: Machine) -> float:
    """Return the time of an iteration of processes, of which each has one of the costs.

    They wait for one another in every exchange: what counts is the slowest lookup and update, and the process that
    sends most, which need not be the same one.

    Example:
        >>> machine = Machine(10**9, memory_gb_per_s=1.0, link_gb_per_s=1.0)
        >>> joint_milliseconds([Cost(memory=3e6), Cost(memory=1e6, wire=2e6)], machine)
        5.0
    """
    wires, sums = [one.wire for one in costs], [one.sums for one in costs]
    if machine.shares_link:
        wires, sums = [sum(wires) / len(costs)], [sum(sums) / len(costs)]
    sent = max(wires) + machine.sum_ratio * max(sums)
    return max(one.local_milliseconds(machine) for one in costs) + sent / machine.link_gb_per_s / 1e6


def table_loads(
    tables: Mapping[str, AnyTable],
    features: Sequence[FeatureConfig],
    optimizer: AnyOptimizer,
    batch_size: int,
    hotness: Mapping[str, float],
    hot_shares: Mapping[str, Mapping[int, float]],
) -> list[TableLoad]:
    """Add up what a batch asks of each table.

    Args:
        hotness: mean number of ids a row of each feature; 1 where it is left out.
        hot_shares: by table, see `TableLoad`.
    """
    loads = []
    for name, table in tables.items():
        own = [feature for feature in features if feature.table == name]
        lookups = batch_size * sum(
            feature.num_places if feature.combiner == "concat" else hotness.get(feature.name, 1.0) for feature in own
        )
        vectors = batch_size * sum(feature.num_places for feature in own)
        rule = (table.optimizer or optimizer) if table.trainable else None
        loads.append(TableLoad(table, rule, lookups, vectors, hot_shares.get(name, {})))
    return loads


def part_cost(
    load: TableLoad,
    kind: Kind,
    num_ranks: int,
    size: int,
    wire_bytes: int = 4,
    num_hot: int = 0,
    cache_bytes: int = 0,
) -> Cost:
    """Return the cost of one process's part, for the owner of a "table" or any of the ranks of the others.

    Reading a row and writing its vector in forward; reading gradients, and reading and writing the distinct rows and
    their state in backward. Vectors come back once and gradients go once, except local ones. A part of
    columns has its share of the bytes of rows and vectors, but all ids: they are sent to every part, are
    sorted in every part, and every part's update finds its distinct rows among them.

    Args:
        num_ranks: processes with a part.
        size: n.
        wire_bytes: of a number on the wire.
        num_hot: hot rows of "hybrid".
        cache_bytes: of the machine.
    """
    cache = cache_bytes
    if kind == "replicated":
        return _replicated(load, size, 1.0, load.num_rows, cache)
    if kind == "hybrid":
        share = load.hot_share.get(num_hot, 0.0)
        cold = _shared(load, num_ranks, size, 1 - share, wire_bytes, cache)
        return _replicated(load, size, share, num_hot, cache) + cold
    if kind == "column":
        whole = _owned(load, load.lookups, load.num_rows, load.vectors, cache)
        width = load.table.dim * wire_bytes / num_ranks
        wire = (size - 1) / size * (load.lookups * _ID_BYTES + 2 * load.vectors * width)
        return Cost(load.bytes / num_ranks, whole / num_ranks, wire, load.lookups)
    if kind == "row":
        return _shared(load, num_ranks, size, 1.0, wire_bytes, cache)
    wire = (size - 1) / size * (load.lookups * _ID_BYTES + 2 * load.vectors * load.table.dim * wire_bytes)
    memory = _owned(load, load.lookups, load.num_rows, load.vectors, cache)
    return Cost(load.bytes, memory, wire, load.lookups)


def _owned(load: TableLoad, lookups: float, num_rows: float, vectors: float, cache: int) -> float:
    """Return the bytes that lookups and their update read and write; what fits into a cache is read once."""
    touched = num_rows * -math.expm1(-lookups / num_rows) if num_rows else 0.0
    width = 4 * load.table.dim
    rows = touched if touched * load.row_bytes <= cache else lookups
    gradients = min(vectors, lookups) if vectors * width <= cache else lookups
    forward = rows * load.row_bytes + load.vectors * width
    return forward + gradients * width + 2 * touched * (load.row_bytes + load.state_bytes)


def _shared(load: TableLoad, num_ranks: int, size: int, share: float, wire_bytes: int, cache: int) -> Cost:
    """Rows shared out: each part returns a vector for every place of the batch, zeros where it has none of its rows."""
    rows, lookups = load.num_rows / num_ranks, share * load.lookups / num_ranks
    wire = (size - 1) / size * (load.lookups * _ID_BYTES + 2 * load.vectors * load.table.dim * wire_bytes)
    # Every id goes to every part, which finds whether the row is its own.
    found = load.lookups * (1 + _ID_OF_OTHERS * (num_ranks - 1)) / num_ranks
    return Cost(load.bytes / num_ranks, _owned(load, lookups, rows, load.vectors, cache), wire, found)


def _replicated(load: TableLoad, size: int, share: float, num_rows: int, cache: int) -> Cost:
    """Local lookups; gradients summed over the processes as one matrix (R, D + 1)."""
    matrix = 4.0 * num_rows * (load.table.dim + 1)
    held = num_rows * (load.row_bytes + load.state_bytes)
    sums = 2 * (size - 1) / size * matrix
    own = share * load.lookups / size
    memory = _owned(load, own, num_rows, load.vectors / size, cache)
    return Cost(held, memory + (3 * matrix if size > 1 else 0.0), 0.0, own, sums)
