"""Conversion of HugeCTR's embedding collections to columns and nodes.

Tables of one width and combiner share one node, whose output (B, S, ev_size) has a slot for each lookup. A table that
is both pooled and concatenated is in a concatenating node; its sums are computed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import sqrt
from typing import Any

from viviane.compat.hugectr.collection import EmbeddingCollectionConfig, EmbeddingTableConfig, TableLookup
from viviane.compat.hugectr.columns import Slot
from viviane.compat.hugectr.solver import OptParams
from viviane.core.errors import ConfigError, suggest
from viviane.embedding import UniformInit
from viviane.model import DenseLayer, SparseEmbedding, TableOptions


def collection_slots(slots: Sequence[Slot], collections: Sequence[EmbeddingCollectionConfig]) -> list[Slot]:
    """Return the slots with the tables of their lookups; a second table of a slot adds a column.

    Raises:
        ConfigError: a lookup refers to an unknown group, or to one with several slots.
    """
    result = list(slots)
    taken: set[str] = set()
    for call in (call for one in collections for call in one.calls):
        for lookup in call.lookups:
            where = f"embedding_lookup {call.top!r}"
            places = [i for i, slot in enumerate(slots) if slot.group == lookup.bottom]
            if not places:
                fix = suggest(lookup.bottom, {slot.group for slot in slots})
                raise ConfigError("a lookup needs a DataReaderSparseParam", where=where, value=lookup.bottom, fix=fix)
            if len(places) > 1:
                raise ConfigError(
                    "a lookup needs a DataReaderSparseParam with one slot",
                    where=where,
                    value=lookup.bottom,
                    allowed="slot_num 1",
                )
            if _find(result, lookup) is not None:
                continue
            (place,) = places
            table = lookup.table
            own = replace(result[place], table=table.name, size=table.size, offset=0, from_zero=True)
            if lookup.bottom in taken:
                source = result[place].column
                result.append(replace(own, column=f"{source}__{table.name}", source=source))
            else:
                result[place] = own
                taken.add(lookup.bottom)
    return result


def _find(slots: Sequence[Slot], lookup: TableLookup) -> Slot | None:
    return next((s for s in slots if (s.group, s.table) == (lookup.bottom, lookup.table.name)), None)


@dataclass
class _Group:
    """A node under construction: tables of one width and combiner."""

    node: str
    combiner: str
    dim: int
    slots: list[Slot]
    tables: dict[str, EmbeddingTableConfig]

    def places(self, slot: Slot) -> range:
        """Return the positions of a slot's vectors in the node's output."""
        start = sum(self._width(one) for one in self.slots[: self.slots.index(slot)])
        return range(start, start + self._width(slot))

    def _width(self, slot: Slot) -> int:
        return 1 if self.combiner != "concat" or slot.one_hot else slot.nnz


class CollectionNodes:
    """The nodes of one collection.

    Args:
        collection: the collection of the script.
        number: index of the collection in its model, from 0.
        slots: result of `collection_slots`.
        optimizer: optimizer of tables without their own.

    Raises:
        ConfigError: a table is both averaged and looked up with another combiner.
    """

    def __init__(
        self, collection: EmbeddingCollectionConfig, number: int, slots: Sequence[Slot], optimizer: OptParams
    ) -> None:
        self.collection, self.optimizer, self._slots = collection, optimizer, slots
        self._groups: dict[tuple[int, str], _Group] = {}
        self._combiners: dict[str, set[str]] = {}
        lookups = [one for call in collection.calls for one in call.lookups]
        for one in lookups:
            self._combiners.setdefault(one.table.name, set()).add(one.combiner)
        for one in lookups:
            found = self._combiners[one.table.name]
            if len(found) > 1 and "mean" in found:
                raise ConfigError(
                    "a table with combiner mean cannot have a second combiner",
                    where=f"table {one.table.name!r}",
                    value=", ".join(sorted(found)),
                    fix="use a separate table for the other lookup",
                )
            combiner = one.combiner if len(found) == 1 else "concat"
            key = (one.table.ev_size, combiner)
            name = f"embedding_collection{number}_{combiner}{key[0]}"
            group = self._groups.setdefault(key, _Group(name, combiner, key[0], [], {}))
            slot = self._slot(one)
            if slot not in group.slots:
                group.slots.append(slot)
            group.tables[one.table.name] = one.table

    def _slot(self, lookup: TableLookup) -> Slot:
        slot = _find(self._slots, lookup)
        assert slot is not None
        return slot

    def _group(self, lookup: TableLookup) -> _Group:
        found = self._combiners[lookup.table.name]
        return self._groups[lookup.table.ev_size, lookup.combiner if len(found) == 1 else "concat"]

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the columns that each embedding node reads, by the name of its input."""
        return {f"{one.node}_keys": tuple(slot.column for slot in one.slots) for one in self._groups.values()}

    def nodes(self) -> list[SparseEmbedding | DenseLayer]:
        """Return the embedding nodes, and the layers that compute the lookups' tensors from their outputs."""
        result: list[SparseEmbedding | DenseLayer] = [self._embedding(one) for one in self._groups.values()]
        for call in self.collection.calls:
            if not call.is_list:
                result += self._single(call.lookups[0], call.top)
                continue
            parts: list[str] = []
            runs = groupby(call.lookups, key=lambda one: (self._group(one).node, self._is_summed(one)))
            for number, ((_, summed), run) in enumerate(runs):
                members = list(run)
                for count, together in enumerate([[one] for one in members] if summed else [members]):
                    name = f"{call.top}__{number}_{count}"
                    result += self._flat(together, name)
                    parts.append(name)
            result.append(DenseLayer(call.top, "Concat", parts, params={"axis": 1}))
        return result

    def _is_summed(self, lookup: TableLookup) -> bool:
        """Return whether a concatenating node has the vectors of a lookup that sums."""
        return self._group(lookup).combiner == "concat" and lookup.combiner == "sum"

    def _single(self, lookup: TableLookup, top: str) -> list[DenseLayer]:
        group = self._group(lookup)
        index = list(group.places(self._slot(lookup)))
        if not self._is_summed(lookup):
            return [DenseLayer(top, "Select", group.node, dim=1, index=index)]
        picked = DenseLayer(f"{top}__places", "Select", group.node, dim=1, index=index)
        return [picked, DenseLayer(top, "ReduceSum", picked.name, axis=1)]

    def _flat(self, lookups: Sequence[TableLookup], top: str) -> list[DenseLayer]:
        group = self._group(lookups[0])
        if self._is_summed(lookups[0]):
            summed = self._single(lookups[0], f"{top}__sum")
            return [*summed, DenseLayer(top, "Reshape", summed[-1].name, leading_dim=group.dim)]
        places = [place for one in lookups for place in group.places(self._slot(one))]
        return [DenseLayer(top, "Reshape", group.node, selected=places)]

    def _embedding(self, group: _Group) -> SparseEmbedding:
        options: dict[str, Any] = {}
        for name, table in group.tables.items():
            bound = 0.05 if table.size is None else sqrt(1 / table.size)
            rule = (table.optimizer or self.optimizer).to_table()
            options[name] = TableOptions(init=UniformInit(low=-bound, high=bound), optimizer=rule)
        return SparseEmbedding(
            name=group.node, bottom=f"{group.node}_keys", dim=group.dim, combiner=group.combiner, tables=options
        )
