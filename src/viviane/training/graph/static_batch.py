"""The static batch of a CUDA graph, and the batch shape that decides which graph serves a batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from viviane.batch import Bag, Batch
from viviane.embedding.base import LocalCollection
from viviane.embedding.static_lookup import Resolved, end_leases, static_copy, tensors_of
from viviane.ops.copies import Refill


def batch_shape(batch: Batch) -> Hashable:
    """Return the properties that two batches must share to be served by one graph.

    A bag column counts by its number of ids; with constant hotness it is always equal.

    Example:
        >>> from viviane.schema import Schema
        >>> schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
        >>> one, other = (Batch.from_columns(schema, {"y": [0, 1], "x": values}) for values in ([1, 2], [3, 4]))
        >>> batch_shape(one) == batch_shape(other)
        True
    """
    bags = tuple(
        (name, bag.values.shape[0], bag.values.dtype, bag.offsets.dtype, _type(bag.weights))
        for name, bag in batch.bags.items()
    )
    plain = [(one.shape, one.dtype) for one in (batch.labels, batch.dense, batch.one_hot)]
    return batch.layout, *plain, bags, _type(batch.weight)


@dataclass
class BatchSources:
    """The tensors of a batch that `StaticBatch.fill` reads; they must live until it has run.

    Args:
        tensors: in the order of the static ones.
        lookups: found before the replay, whose rows stay in memory until `release`.
    """

    tensors: list[Tensor | None]
    lookups: list[Resolved]

    def release(self) -> None:
        """Let the rows of the lookups go once the replay is queued."""
        for one in self.lookups:
            end_leases(one)


class StaticBatch:
    """Tensors that a graph reads, filled from one batch after another.

    Args:
        like: a batch on the device; its values are copied.
        collections: whose lookups are found before each replay, and are filled in, too.
    """

    def __init__(self, like: Batch, collections: Sequence[LocalCollection] = ()) -> None:
        bags = {name: _clone(bag) for name, bag in like.bags.items()}
        weight = None if like.weight is None else like.weight.clone()
        self.batch = replace(
            like, labels=_dense(like.labels), dense=_dense(like.dense), one_hot=_dense(like.one_hot), bags=bags,
            weight=weight, origin="",
        )  # fmt: skip
        self._collections = list(collections)
        self._lookups = [static_copy(one.resolved_for_replay(like)) for one in self._collections]
        every = [*_tensors(self.batch), *(part for one in self._lookups for part in tensors_of(one))]
        self._places = [i for i, one in enumerate(every) if one is not None and one.numel()]
        self._refill = Refill(self._with_numbers(every))

    @property
    def width(self) -> int:
        """Number of words that `fill` reads."""
        return self._refill.width

    def sources(self, batch: Batch) -> BatchSources:
        """Return what `fill` is to read for a batch of the same shape, with its lookups.

        Raises:
            CacheFullError: the rows of the batch do not fit into the cache of their table.
        """
        lookups = [one.resolved_for_replay(batch) for one in self._collections]
        return BatchSources([*_tensors(batch), *(part for one in lookups for part in tensors_of(one))], lookups)

    def words(self, sources: BatchSources) -> list[int]:
        """Return the words that `fill` reads; see `viviane.ops.copies.Refill`."""
        return self._refill.words(self._with_numbers(sources.tensors))

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Let a block that looks up the static batch, which is captured, use the static lookups."""
        for collection, found in zip(self._collections, self._lookups, strict=True):
            collection.provide(self.batch, found)
        try:
            yield
        finally:
            for collection in self._collections:
                collection.forget_ahead(self.batch)

    def fill(self, words: Tensor) -> None:
        """Copy the batch described by these words, on the device."""
        self._refill.fill(words)

    def _with_numbers(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the non-empty tensors; batches of the same shape have the same ones."""
        return [one for one in map(tensors.__getitem__, self._places) if one is not None]


def _type(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _dense(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _clone(bag: Bag) -> Bag:
    return Bag(bag.values.clone(), bag.offsets.clone(), None if bag.weights is None else bag.weights.clone())


def _tensors(batch: Batch) -> list[Tensor | None]:
    """Return the tensors of a batch, in an order that depends only on its shape."""
    found = [batch.labels, batch.dense, batch.one_hot, batch.weight]
    for bag in batch.bags.values():
        found += (bag.values, bag.offsets, bag.weights)
    return found
