"""Batches without labels: cut, joined, padded, and with ids of another type.

Shapes: B rows, F one-hot features, N dense numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag, Batch, Layout
from viviane.core.errors import DataError, KeyRangeError
from viviane.schema import Schema


def padding_batch(schema: Schema, size: int) -> Batch:
    """Return rows of zeros and padding ids; bags are empty, or of their column's hotness."""
    wide = any(column.dtype == "int64" for column in schema.one_hot)
    bags = {}
    for column in schema.bags:
        length = column.hotness or 0
        weights = None if column.weights is None else torch.ones(size * length)
        ids = torch.zeros(size * length, dtype=torch.int64 if column.dtype == "int64" else torch.int32)
        bags[column.name] = Bag(ids, torch.arange(size + 1) * length, weights)
    return Batch(
        layout=Layout.of(schema),
        labels=torch.zeros(size, 0),
        dense=torch.zeros(size, schema.num_dense),
        one_hot=torch.zeros(size, len(schema.one_hot), dtype=torch.int64 if wide else torch.int32),
        bags=bags,
    )


def random_batch(schema: Schema, size: int) -> Batch:
    """Return rows of random numbers and ids, the same at each call, for columns of one id that have a range."""
    batch = padding_batch(schema, size)
    generator = torch.Generator().manual_seed(size)
    batch.dense.normal_(generator=generator)
    for place, column in enumerate(schema.one_hot):
        batch.one_hot[:, place] = torch.randint(0, column.id_range, (size,), generator=generator)
    return batch


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Return some rows of a batch, without labels."""
    stop = min(stop, batch.size)
    bags = {}
    for name, bag in batch.bags.items():
        first, last = int(bag.offsets[start]), int(bag.offsets[stop])
        weights = None if bag.weights is None else bag.weights[first:last]
        bags[name] = Bag(bag.values[first:last], bag.offsets[start : stop + 1] - first, weights)
    return Batch(
        layout=batch.layout,
        labels=batch.labels[start:stop, :0],
        dense=batch.dense[start:stop],
        one_hot=batch.one_hot[start:stop],
        bags=bags,
        origin=batch.origin,
    )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of batches of one layout, one after another, without labels."""
    first = batches[0]
    bags = {}
    for name in first.bags:
        parts = [batch.bags[name] for batch in batches]
        lengths = torch.cat([part.lengths for part in parts])
        weights = [part.weights for part in parts if part.weights is not None]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = torch.cat([part.values for part in parts])
        bags[name] = Bag(values, offsets, torch.cat(weights) if weights else None)
    return Batch(
        layout=first.layout,
        labels=torch.zeros(sum(batch.size for batch in batches), 0),
        dense=torch.cat([batch.dense for batch in batches]),
        one_hot=torch.cat([batch.one_hot for batch in batches]),
        bags=bags,
        origin=first.origin,
    )


def spread(batch: Batch, places: NDArray[np.int64], size: int, schema: Schema) -> Batch:
    """Return a batch of `size` rows that has row i of a smaller one at `places[i]`, and padding rows elsewhere.

    Args:
        places: rising, (B,).
    """
    whole = padding_batch(schema, size)
    at = torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64))
    whole.dense[at] = batch.dense
    whole.one_hot[at] = batch.one_hot.to(whole.one_hot.dtype)
    bags = {}
    for name, bag in batch.bags.items():
        empty = whole.bags[name]
        lengths = empty.lengths.clone()
        lengths[at] = bag.lengths
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        kept = torch.zeros(size, dtype=torch.bool)
        kept[at] = True
        mine = torch.repeat_interleave(kept, lengths)
        values = torch.zeros(int(offsets[-1]), dtype=bag.values.dtype)
        values[mine] = bag.values
        weights = None
        if bag.weights is not None:
            weights = torch.ones(len(values))
            weights[mine] = bag.weights
        bags[name] = Bag(values, offsets, weights)
    return Batch(whole.layout, whole.labels, whole.dense, whole.one_hot, bags, origin=batch.origin)


def ids_as(ids: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return ids in another type of whole numbers.

    Raises:
        DataError: they are no int32 or int64.
        KeyRangeError: one does not fit.

    Example:
        >>> ids_as(torch.tensor([7]), torch.int32, "one_hot")
        tensor([7], dtype=torch.int32)
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise DataError("ids have another type", where=where, value=str(ids.dtype), allowed="int32 or int64")
    found = ids.to(dtype)
    wrong = found != ids
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise KeyRangeError(
            "an id does not fit its column's type", where=f"{where}[{', '.join(map(str, place))}]",
            value=int(ids[tuple(place)]), allowed=str(dtype).removeprefix("torch."),
        )  # fmt: skip
    return found
