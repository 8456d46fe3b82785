"""Rows of an embedding's tables, with HugeCTR's keys and optimizer state.

Shapes: K keys, D elements per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.processes import rows_of_all
from viviane.embedding import EmbeddingCollection, TableState
from viviane.embedding.dynamic_content import DynamicContent
from viviane.model import Model, SparseEmbedding
from viviane.parallel import ShardedCollection

Keys: TypeAlias = NDArray[np.int64]
AnyTables: TypeAlias = EmbeddingCollection | ShardedCollection
Rows: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class TableRows:
    """The content of tables.

    Args:
        keys: (K,), in HugeCTR's numbering, with slot offsets.
        vectors: (K, D).
        slots: the slot of each key, or None if slots share a table.
        states: optimizer state by Viviane's name, each (K, D).
    """

    keys: Keys
    vectors: Rows
    slots: NDArray[np.int64] | None = None
    states: Mapping[str, Rows] = field(default_factory=dict)


def embeddings_of(model: Model) -> list[SparseEmbedding]:
    """Return the embedding nodes in order."""
    return [node for node in model.nodes if isinstance(node, SparseEmbedding)]


def collection_of(model: Model, node: SparseEmbedding) -> AnyTables:
    """Return the tables of a node, which may be sharded over processes."""
    found = model.module._modules[node.name]
    assert isinstance(found, EmbeddingCollection | ShardedCollection)
    return found


def slots_of(node: SparseEmbedding, columns: Columns) -> list[Slot]:
    """Return the slots of a SparseEmbedding."""
    return [slot for slot in columns.slots if slot.group == node.bottom and not slot.table]


def read_rows(collection: AnyTables, slots: Sequence[Slot]) -> TableRows:
    """Return the rows of the tables of some slots, those of sized slots in the order of their keys."""
    if slots[0].size is None:
        return _read_dynamic(collection, slots[0].table_name)
    tables = [collection.export_table(slot.table_name, copy=False) for slot in slots]
    keys = [slot.offset + np.arange(slot.size or 0) for slot in slots]
    places = [np.full(slot.size or 0, place) for place, slot in enumerate(slots)]
    states = {
        name: np.concatenate([_array(one.state[name][1:]) for one in tables])
        for name, part in tables[0].state.items()
        if part.dim() == 2
    }
    vectors = np.concatenate([_array(one.weight[1:]) for one in tables])
    return TableRows(np.concatenate(keys), vectors, np.concatenate(places), states)


def _read_dynamic(collection: AnyTables, name: str) -> TableRows:
    """Return the rows of a dynamic table; if it is sharded, the rows of all processes on every process."""
    part = _part_of(collection, name)
    if isinstance(collection, EmbeddingCollection):
        content = collection.dynamic_table(name).export()
        states = {key: _array(values) for key, values in content.state.items() if values.dim() == 2}
        return TableRows(content.keys.cpu().numpy(), _array(content.weight), None, states)
    replicated = all(shard.rank is None for shard in collection.shards[name])
    found: dict[str, torch.Tensor] = {}
    if part is not None:
        content = part.dynamic_table(name).export()
        found = {"keys": content.keys, "weight": content.weight.float(), **content.state}
    wide = [key for key, (is_wide, _) in collection.state_shapes(name).items() if is_wide]  # including the weight
    none = torch.empty(0, collection.tables[name].dim, device=collection.device)
    parts = {"keys": found.get("keys", none[:, 0].long()), **{key: found.get(key, none) for key in wide}}
    whole = {key: values if replicated else rows_of_all(values) for key, values in parts.items()}
    keys, weight = whole.pop("keys"), whole.pop("weight")
    return TableRows(keys.cpu().numpy(), _array(weight), None, {key: _array(one) for key, one in whole.items()})


def _array(part: torch.Tensor) -> Rows:
    return part.float().cpu().numpy()


def replace_rows(collection: AnyTables, slots: Sequence[Slot], rows: TableRows, where: str) -> None:
    """Replace the rows of the tables of some slots; missing keys keep their initial values.

    Rows with keys outside all slots are skipped with a warning, see `merge_rows`.
    """
    if slots[0].size is None:
        name = slots[0].table_name
        part = _part_of(collection, name)
        if part is not None:
            part.dynamic_table(name).clear()
    merge_rows(collection, slots, rows, where)


def merge_rows(collection: AnyTables, slots: Sequence[Slot], rows: TableRows, where: str) -> None:
    """Insert rows into the tables of some slots; other rows are kept.

    Rows with keys outside all slots are skipped with a warning: HugeCTR's tables accept them, but no key of the data
    ever reads them.
    """
    if slots[0].size is None:
        part = _part_of(collection, slots[0].table_name)
        if part is not None:
            _merge_dynamic(part, slots[0].table_name, rows)
        return
    left = np.ones(len(rows.keys), bool)
    for slot in slots:
        mine = (rows.keys >= slot.offset) & (rows.keys < slot.offset + (slot.size or 0))
        before = collection.export_table(slot.table_name)
        places = torch.from_numpy(rows.keys[mine] - slot.offset + 1)
        before.weight[places] = torch.from_numpy(rows.vectors[mine]).to(before.weight)
        for name, values in rows.states.items():
            before.state[name][places] = torch.from_numpy(values[mine]).to(before.state[name])
        state = before.state if rows.states else {}
        collection.import_table(slot.table_name, TableState(before.weight, state, before.step if state else 0))
        left &= ~mine
    if left.any():
        last = slots[-1].offset + (slots[-1].size or 0) - 1
        say(
            f"Warning: {where}: {int(left.sum())} of {len(left)} keys are in no slot, such as "
            f"{int(rows.keys[left][0])}; slot_size_array covers {slots[0].offset} to {last}: their rows are skipped"
        )


def with_offsets(slots: Sequence[Slot], rows: TableRows, where: str) -> TableRows:
    """Return rows whose keys include the offsets of their slots; keys that start at 0 in each slot need slot_id.

    Keys already include offsets if each is in its own slot. Without slots they are not changed.
    """
    if rows.slots is None or not len(rows.keys) or int(rows.slots.max()) >= len(slots) or int(rows.slots.min()) < 0:
        return rows
    begins, sizes = (np.array([value or 0 for value in values], np.int64) for values in
                     ([one.offset for one in slots], [one.size for one in slots]))  # fmt: skip
    begin, size = begins[rows.slots], sizes[rows.slots]
    if bool(((rows.keys >= begin) & (rows.keys < begin + size)).all()):
        return rows
    if not bool(((rows.keys >= 0) & (rows.keys < size)).all()):
        return rows
    say(f"Note: {where}: keys start at 0 in each slot; slot_id determines the slot")
    return replace(rows, keys=rows.keys + begin)


def _part_of(collection: AnyTables, name: str) -> EmbeddingCollection | None:
    """Return the part of this process that holds a dynamic table; None if another process holds it."""
    return next((one for one in collection.parts() if name in one.tables), None)


def _merge_dynamic(collection: EmbeddingCollection, name: str, rows: TableRows) -> None:
    table = collection.dynamic_table(name)
    keys, none = torch.from_numpy(rows.keys), torch.zeros(len(rows.keys), dtype=torch.int64)
    state: dict[str, Any] = {}
    if rows.states:
        state = {name: torch.from_numpy(values) for name, values in rows.states.items()}
        for key, part in table.state.items():  # step counts restart
            state.setdefault(key, torch.zeros((len(keys), *part.shape[1:]), dtype=part.dtype))
    table.import_(DynamicContent(keys, torch.from_numpy(rows.vectors), none, none, state))
