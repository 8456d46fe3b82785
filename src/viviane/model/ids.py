"""Ids as a tensor, for the layers that count or compare them instead of looking them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.core.errors import ConfigError, SchemaError, suggest
from viviane.nn import EMPTY_ID
from viviane.schema import Schema


def id_places(groups: Mapping[str, tuple[str, ...]], group: str, schema: Schema, where: str) -> list[tuple[str, int]]:
    """Return the columns of a group with the number of places that each takes: 1, or its max_length.

    Args:
        groups: the columns of each group.
        where: what asks, for the message.

    Raises:
        ConfigError: no such group. SchemaError: a bag whose longest is unknown.
    """
    if group not in groups:
        what = "the layer reads ids: a group of categorical columns"
        raise ConfigError(what, where=where, value=group, fix=suggest(group, groups))
    places = []
    for name in groups[group]:
        column = schema.categorical_column(name)
        if column.kind != "one_hot" and column.max_length is None:
            fix = "set the column's max_length in the schema"
            raise SchemaError("a layer that reads ids needs to know the longest bag", where=where, value=name, fix=fix)
        places.append((name, column.max_length or 1))
    return places


class Ids:
    """Returns the ids of a group of columns side by side, (B, S), int64, with EMPTY_ID where a bag is shorter.

    Args:
        places: columns and the places of each, see `id_places`.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[
        ...     {"name": "c", "num_ids": 9}, {"name": "h", "num_ids": 9, "kind": "sequence", "max_length": 2}])
        >>> ids = Ids([("c", 1), ("h", 2)])(Batch.from_columns(schema, {"c": [3, 4], "h": [[5, 6], [7]]}))
        >>> (ids == EMPTY_ID).tolist(), ids[0].tolist()
        ([[False, False, False], [False, False, True]], [3, 5, 6])
    """

    def __init__(self, places: Sequence[tuple[str, int]]) -> None:
        self.places = tuple(places)
        self.columns = tuple(name for name, _ in places)

    def __call__(self, batch: Batch) -> Tensor:
        """Return the ids of a batch."""
        parts = []
        for name, length in self.places:
            if name in batch.bags:
                parts.append(_spread(batch.bags[name], length))
            else:
                parts.append(batch.one_hot[:, batch.layout.one_hot_index[name]].to(torch.int64).unsqueeze(1))
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _spread(bag: Bag, length: int) -> Tensor:
    """Lay bags out as (B, length); what does not fit is cut: the lookup of the same column refuses it by name."""
    ids = bag.values.to(torch.int64)
    known = torch.cat([ids, ids.new_full((1,), EMPTY_ID)])
    place = torch.arange(length, device=ids.device)
    at = torch.where(place < bag.lengths.unsqueeze(1), bag.offsets[:-1].unsqueeze(1) + place, ids.shape[0])
    return known[at]
