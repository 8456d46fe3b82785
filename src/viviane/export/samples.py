"""Batches for comparing an artifact with its model: all kinds of keys, empty bags, large and small values.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.embedding import DynamicTableConfig, TableConfig
from viviane.embedding.base import TableCollection
from viviane.export.manifest import KeyLimit
from viviane.schema import CategoricalColumn, Schema

SIZES: Final = (1, 7, 1024)
_LONGEST = 12  # maximum ids of a bag without a known maximum
_EDGES: Final = (-(2**63), -1, 2**31, 2**63 - 1)
_SHARE_ODD = 0.2

Sort = Literal["usual", "empty", "extreme"]


@dataclass(frozen=True)
class ColumnKeys:
    """Valid keys of a categorical column.

    Args:
        num_rows: rows of its tables: the minimum, if they differ; None: any key.
        known: existing keys of its dynamic tables.
        takes_any: none of its tables refuses keys out of range.
        max_length: maximum bag length that all tables accept; None: any.
    """

    num_rows: int | None
    known: Tensor
    takes_any: bool
    max_length: int | None


def column_keys(schema: Schema, collections: Mapping[str, TableCollection]) -> dict[str, ColumnKeys]:
    """Return the valid keys of each categorical column, according to its tables."""
    found = {}
    for column in schema.categorical:
        rows: list[int] = [] if column.num_ids is None else [column.num_ids]
        lengths = [] if column.max_length is None else [column.max_length]
        known, takes_any = torch.empty(0, dtype=torch.int64), True
        for collection in collections.values():
            feature = collection.features.get(column.name)
            if feature is None:
                continue
            if feature.combiner == "concat":
                lengths.append(feature.num_places)
            table = collection.tables[feature.table]
            if isinstance(table, TableConfig):
                rows.append(table.num_rows)
                takes_any = takes_any and table.out_of_range != "raise"
            elif isinstance(table, DynamicTableConfig):
                index = collection.parts()[0].dynamic_table(feature.table).index
                known = torch.cat([known, index.keys[index.rows_in_use()].cpu()])
        found[column.name] = ColumnKeys(min(rows, default=None), known, takes_any, min(lengths, default=None))
    return found


def key_limits(schema: Schema, collections: Mapping[str, TableCollection]) -> tuple[KeyLimit, ...]:
    """Return the limits that are checked before a program runs: of tables with "raise", and of "concat" features."""
    names, found = {column.name for column in schema.categorical}, []
    for collection in collections.values():
        for name, feature in collection.features.items():
            table = collection.tables[feature.table]
            raises = isinstance(table, TableConfig) and table.out_of_range == "raise"
            length = feature.num_places if feature.combiner == "concat" else None
            if name in names and (raises or length is not None):
                rows = table.num_rows if raises and isinstance(table, TableConfig) else None
                limit = KeyLimit(column=name, table=table.name, num_rows=rows, max_length=length)
                if limit not in found:
                    found.append(limit)
    return tuple(found)


def make_batch(
    schema: Schema, keys: Mapping[str, ColumnKeys], size: int, sort: Sort, seed: int, *, odd_keys: bool = True
) -> Batch:
    """Draw a batch.

    Args:
        schema: the columns.
        keys: result of `column_keys`.
        size: B.
        sort: "usual"; "empty": all bags are empty; "extreme": dense values from 10^-4 to 10^4.
        seed: seed of the batch.
        odd_keys: use keys out of range if no table refuses them.
    """
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, schema.num_dense, generator=draw)
    if sort == "extreme" and dense.numel():
        powers = torch.rand(dense.shape, generator=draw) * 8 - 4  # 10^-4 to 10^4
        dense = dense.sign() * 10**powers
        special = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1.0, -1.0, 1e4, -1e4])
        odd = torch.rand(dense.shape, generator=draw) < _SHARE_ODD
        dense = torch.where(odd, special[torch.randint(len(special), dense.shape, generator=draw)], dense)
    one_hot = [_keys(column, keys[column.name], size, draw, odd_keys) for column in schema.one_hot]
    bags = {column.name: _bag(column, keys[column.name], size, sort, draw, odd_keys) for column in schema.bags}
    ids = torch.stack(one_hot, 1) if one_hot else torch.zeros(size, 0, dtype=torch.int64)
    return Batch(Layout.of(schema), torch.zeros(size, 0), dense, ids, bags, origin=f"{sort} rows of the comparison")


def _keys(column: CategoricalColumn, own: ColumnKeys, count: int, draw: torch.Generator, odd_keys: bool) -> Tensor:
    """Draw keys: known, reserved, last, absent and out-of-range ones."""
    if own.num_rows is not None:
        usual = torch.randint(own.num_rows, (count,), generator=draw)
        odd = [key for key in (0, 1, 2, own.num_rows - 1) if key < own.num_rows]
        odd += [*_EDGES, own.num_rows] if odd_keys and own.takes_any and not len(own.known) else []
    else:
        absent = torch.randint(-(2**62), 2**62, (max(count, 1),), generator=draw)
        pool = torch.cat([own.known, absent[: max(len(own.known), 1)]])
        usual = pool[torch.randint(len(pool), (count,), generator=draw)]
        odd = [0, 1, 2, *(_EDGES if odd_keys else ())]
    choice = torch.tensor(odd)[torch.randint(len(odd), (count,), generator=draw)]
    return torch.where(torch.rand(count, generator=draw) < _SHARE_ODD, choice, usual)


def _bag(
    column: CategoricalColumn, own: ColumnKeys, size: int, sort: Sort, draw: torch.Generator, odd_keys: bool
) -> Bag:
    longest = own.max_length or _LONGEST
    lengths = torch.randint(longest + 1, (size,), generator=draw)
    lengths = torch.where(torch.rand(size, generator=draw) < _SHARE_ODD, 0, lengths)
    if column.hotness is not None:
        lengths = torch.full((size,), column.hotness)
    elif sort == "empty":
        lengths = torch.zeros(size, dtype=torch.int64)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = _keys(column, own, int(offsets[-1]), draw, odd_keys)
    weights = None
    if column.weights is not None:
        weights = torch.rand(len(values), generator=draw) * 2
        weights = torch.where(torch.rand(len(values), generator=draw) < _SHARE_ODD, 0.0, weights)
    return Bag(values, offsets, weights)


def refused_batches(batch: Batch, limits: Sequence[KeyLimit]) -> list[tuple[KeyLimit, Batch]]:
    """Return, for each table that raises, a batch with a key beyond its range."""
    found = []
    for limit in limits:
        if limit.num_rows is None:
            continue
        if limit.column in batch.layout.one_hot_index:
            ids = batch.one_hot.clone()
            ids[-1, batch.layout.one_hot_index[limit.column]] = limit.num_rows
            found.append((limit, Batch(batch.layout, batch.labels, batch.dense, ids, batch.bags)))
        elif len(batch.bags[limit.column].values):
            bag = batch.bags[limit.column]
            values = bag.values.clone()
            values[-1] = limit.num_rows
            bags = {**batch.bags, limit.column: Bag(values, bag.offsets, bag.weights)}
            found.append((limit, Batch(batch.layout, batch.labels, batch.dense, batch.one_hot, bags)))
    return found
