"""Input rows of a model for users and items with only some columns given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import ConfigError, SchemaError
from viviane.model import GraphModule, Model
from viviane.retrieval.histories import Histories, Ids
from viviane.schema import CategoricalColumn, Schema

_ROWS = 4096


@dataclass(frozen=True)
class Roles:
    """The history column and the item column of a model, which share a vocabulary.

    Args:
        history: None for a model without a history.
    """

    history: str | None
    item: str
    num_items: int
    max_length: int | None = None

    @classmethod
    def of(cls, schema: Schema, history: str | None = None, item: str | None = None) -> Roles:
        """Return the named columns, or detect them in a schema.

        Raises:
            SchemaError: a column does not exist, or is ambiguous.
        """
        if history is None:
            known = [column for column in schema.categorical if column.kind == "sequence"]
            if item is not None:
                table = schema.categorical_column(item).table
                known = [column for column in known if column.table == table]
        else:
            known = [schema.categorical_column(history)]
        if len(known) > 1:
            value = ", ".join(column.name for column in known)
            raise SchemaError("the history column is ambiguous", value=value, fix="specify it: history='clicked_items'")
        of = known[0] if known else None
        if of is not None and of.kind == "one_hot":
            raise SchemaError("the history must be a bag column", value=of.name, fix="choose a sequence column")
        items = [schema.categorical_column(item)] if item is not None else [
            column for column in schema.one_hot if of is not None and column.table == of.table
        ]  # fmt: skip
        if len(items) != 1:
            value = ", ".join(column.name for column in items) or "no one-hot column shares the history's vocabulary"
            if of is None:
                raise SchemaError(
                    "which column holds items? the schema has no history, whose vocabulary would tell",
                    value=", ".join(column.name for column in schema.one_hot)[:200],
                    fix="in Python, specify it: item='item_id'; or train a model of histories, such as sasrec",
                )
            raise SchemaError("the item column is ambiguous", value=value, fix="in Python, specify it: item='item_id'")
        (found,) = items
        if found.num_ids is None:
            fix = "process the data with `viviane etl`, which encodes the items"
            raise SchemaError("retrieval needs encoded item ids", value=found.name, fix=fix)
        if of is not None and of.table != found.table:
            raise SchemaError("history and item must share a vocabulary", value=f"{of.name}, {found.name}")
        if of is None:
            return cls(None, found.name, found.num_ids)
        return cls(of.name, found.name, found.num_ids, of.max_length)


def vectors(model: Model, tensor: str, num_rows: int, given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return a tensor of a model's graph for rows with some columns given, (rows, ...).

    Missing columns are empty: bags without ids, padding in one-hot columns. This is correct for columns that do not
    affect the tensor but are looked up together with columns that do, such as the item with the history. Dense
    columns have no such value.

    Args:
        given: columns by name: arrays, or `Histories` for bags, which are truncated to the newest max_length ids.

    Raises:
        SchemaError: a dense column is missing, or an unknown column is given.
        ConfigError: the model is not a graph, or has no such tensor.
    """
    module = model.module
    if not isinstance(module, GraphModule):
        raise ConfigError("only a graph has tensors by name", value=type(module).__name__)
    schema = model.schema.select(module.columns_of(tensor))
    parts = [model.tensor(tensor, batch) for batch in batches(schema, num_rows, given)]
    return np.concatenate(parts) if parts else np.empty((0, 0), dtype=np.float32)


def batches(schema: Schema, num_rows: int, given: Mapping[str, Any], size: int = _ROWS) -> Iterator[Batch]:
    """Yield batches of rows with some columns given; see `vectors`."""
    bags = {
        column.name: Histories.of(given[column.name]).newest(column.max_length or 2**62)
        for column in schema.bags
        if column.name in given
    }
    for name, one in [*bags.items(), *((n, v) for n, v in given.items() if n not in bags)]:
        if len(one) != num_rows:
            raise SchemaError("a column has a wrong number of rows", where=name, value=len(one), allowed=str(num_rows))
    for first in range(0, num_rows, size):
        yield _batch(schema, first, min(first + size, num_rows), given, bags)


def _batch(schema: Schema, first: int, stop: int, given: Mapping[str, Any], bags: Mapping[str, Histories]) -> Batch:
    rows, count = slice(first, stop), stop - first
    wide = any(column.dtype == "int64" for column in schema.one_hot)
    ids = torch.int64 if wide else torch.int32
    one_hot = torch.zeros(count, len(schema.one_hot), dtype=ids)  # padding
    for place, column in enumerate(schema.one_hot):
        if column.name in given:
            one_hot[:, place] = torch.as_tensor(np.asarray(given[column.name][rows])).to(ids)
    dense = []
    for number in schema.dense:
        if number.name not in given:
            raise SchemaError("a column is missing", value=number.name, fix="pass it with the history")
        values = np.asarray(given[number.name][rows], dtype=np.float32)
        dense.append(torch.from_numpy(values.reshape(count, number.dim)))
    return Batch(
        Layout.of(schema),
        labels=torch.zeros(count, 0),
        dense=torch.cat(dense, 1) if dense else torch.zeros(count, 0),
        one_hot=one_hot,
        bags={column.name: _bag(column, bags.get(column.name), rows, count) for column in schema.bags},
        origin=f"rows {first} to {stop}",
    )


def _bag(column: CategoricalColumn, histories: Histories | None, rows: slice, count: int) -> Bag:
    if histories is None:
        some = Histories(np.empty(0, dtype=np.int64), np.zeros(count + 1, dtype=np.int64))
    else:
        some = histories.take(rows)
    if column.hotness is not None:
        some = some.padded(column.hotness)
    return some.bag(getattr(torch, column.dtype))


def all_items(roles: Roles) -> Ids:
    """Return every id of the catalogue including reserved ones, so that row i of the vectors is item i."""
    return np.arange(roles.num_items, dtype=np.int64)
