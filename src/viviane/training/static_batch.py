"""A batch whose tensors stay where they are, for CUDA graphs, and what makes batches alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.ops.copies import Refill


def batch_shape(batch: Batch) -> Hashable:
    """Return what two batches must have in common for one graph to serve both.

    Bags count by their number of ids: with a fixed number of ids a row they are always alike.

    Example:
        >>> from viviane.schema import Schema
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
        >>> one, other = (Batch.from_columns(schema, {"y": [0, 1], "x": values}) for values in ([1, 2], [3, 4]))
        >>> batch_shape(one) == batch_shape(other)
        True
    """
    bags = tuple(
        (name, bag.values.shape[0], bag.values.dtype, bag.offsets.dtype, bag.weights is None)
        for name, bag in batch.bags.items()
    )
    one_hot = (batch.one_hot.shape, batch.one_hot.dtype)
    return batch.layout, batch.labels.shape, batch.dense.shape, one_hot, bags, batch.weight is None


class StaticBatch:
    """Tensors that a graph reads, filled from one batch after another.

    Args:
        like: a batch on the device; its numbers are copied.
        num_slots: how many batches may be on their way at once: the one before the last `num_slots` must be there.
    """

    def __init__(self, like: Batch, num_slots: int) -> None:
        bags = {name: _clone(bag) for name, bag in like.bags.items()}
        weight = None if like.weight is None else like.weight.clone()
        self.batch = replace(
            like, labels=_dense(like.labels), dense=_dense(like.dense), one_hot=_dense(like.one_hot), bags=bags,
            weight=weight, origin="",
        )  # fmt: skip
        self._refill = Refill(list(_tensors(self.batch)), num_slots)

    def fill(self, batch: Batch) -> None:
        """Copy a batch of the same shape."""
        self._refill(list(_tensors(batch)))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _clone(bag: Bag) -> Bag:
    return Bag(bag.values.clone(), bag.offsets.clone(), None if bag.weights is None else bag.weights.clone())


def _parts(bag: Bag) -> tuple[Tensor, Tensor, Tensor | None]:
    return bag.values, bag.offsets, bag.weights


def _tensors(batch: Batch) -> Iterator[Tensor]:
    """Give the tensors of a batch that have numbers, in an order that its shape decides."""
    bags = [one for bag in batch.bags.values() for one in _parts(bag)]
    for tensor in (batch.labels, batch.dense, batch.one_hot, batch.weight, *bags):
        if tensor is not None and tensor.numel():
            yield tensor
