"""Rows of a model for users and items of which only some columns are given."""

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
    """The columns of a history and of the item that is compared with it, of one vocabulary.

    Args:
        history: None for a model that reads no history.
    """

    history: str | None
    item: str
    num_items: int
    max_length: int | None = None

    @classmethod
    def of(cls, schema: Schema, history: str | None = None, item: str | None = None) -> Roles:
        """Find the columns in a schema, or take those named.

        Raises:
            SchemaError: there is no such column, or a choice of several.
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
            raise SchemaError("which column is the history?", value=value, fix="name it: history='clicked_items'")
        of = known[0] if known else None
        if of is not None and of.kind == "one_hot":
            raise SchemaError("a history is a column of several ids", value=of.name, fix="name a sequence column")
        items = [schema.categorical_column(item)] if item is not None else [
            column for column in schema.one_hot if of is not None and column.table == of.table
        ]  # fmt: skip
        if len(items) != 1:
            value = ", ".join(column.name for column in items) or "no one-hot column shares the history's vocabulary"
            raise SchemaError("which column is the item?", value=value, fix="name it: item='item_id'")
        (found,) = items
        if found.num_ids is None:
            fix = "clean the data with `viviane etl`, which numbers the items"
            raise SchemaError("retrieval needs items that are numbered", value=found.name, fix=fix)
        if of is not None and of.table != found.table:
            raise SchemaError("history and item share a vocabulary", value=f"{of.name}, {found.name}")
        if of is None:
            return cls(None, found.name, found.num_ids)
        return cls(of.name, found.name, found.num_ids, of.max_length)


def vectors(model: Model, tensor: str, num_rows: int, given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return a tensor of a model's graph for rows of which some columns are given, (rows, ...).

    What is not given is empty: bags without ids, padding in columns of one id. That is right for columns that the
    tensor does not depend on but that are looked up together with those that it does, such as the item beside the
    history; a column of numbers has no such value.

    Args:
        given: columns by name: arrays, or `Histories` for bags, which are cut to the newest max_length ids.

    Raises:
        SchemaError: a column of numbers is missing, or an unknown one is given.
        ConfigError: the model is no graph, or has no such tensor.
    """
    module = model.module
    if not isinstance(module, GraphModule):
        raise ConfigError("only a graph has tensors by name", value=type(module).__name__)
    schema = model.schema.select(module.columns_of(tensor))
    parts = [model.tensor(tensor, batch) for batch in batches(schema, num_rows, given)]
    return np.concatenate(parts) if parts else np.empty((0, 0), dtype=np.float32)


def batches(schema: Schema, num_rows: int, given: Mapping[str, Any], size: int = _ROWS) -> Iterator[Batch]:
    """Yield batches of rows of which some columns are given; see `vectors`."""
    bags = {
        column.name: Histories.of(given[column.name]).newest(column.max_length or 2**62)
        for column in schema.bags
        if column.name in given
    }
    for name, one in [*bags.items(), *((n, v) for n, v in given.items() if n not in bags)]:
        if len(one) != num_rows:
            raise SchemaError("a column has another number of rows", where=name, value=len(one), allowed=str(num_rows))
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
            raise SchemaError("a column is missing", value=number.name, fix="give it beside the history")
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
    """Return every id of the catalogue, the reserved ones, too: row i of the vectors is item i."""
    return np.arange(roles.num_items, dtype=np.int64)
