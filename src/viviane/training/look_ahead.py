"""Prefetch of table rows in tiers for the batches that wait for their step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from viviane.batch import Batch
from viviane.embedding import EmbeddingCollection
from viviane.embedding.module_parts import collections_of
from viviane.parallel.collection import ShardedCollection


class LookAhead:
    """Announces batches to the collections of a module that have tables in tiers.

    Of several processes each first sends the keys of a batch to those that hold their rows, all in the same order.
    The constructor and `exchange` are collective then.

    Args:
        module: the module to train.
        num_batches: number of batches that are announced before their step.

    Example:
        >>> LookAhead(nn.Linear(1, 1)).is_needed
        False
    """

    def __init__(self, module: nn.Module, num_batches: int = 3) -> None:
        self.num_batches = num_batches
        every = collections_of(module).values()
        self._collections = [one for one in every if isinstance(one, EmbeddingCollection) and one.looks_ahead]
        sharded = [one.batches_ahead for one in every if isinstance(one, ShardedCollection)]
        self._sharded = [one for one in sharded if one.is_needed()]

    @property
    def is_needed(self) -> bool:
        """Whether a collection can prefetch rows, in this process or in another one of the group."""
        return bool(self._collections or self._sharded)

    @property
    def exchanges(self) -> bool:
        """Whether processes exchange keys ahead, so that all of them must announce the same number of batches."""
        return bool(self._sharded)

    @property
    def needs_host(self) -> bool:
        """Whether batches on a GPU are announced with the same keys in host memory."""
        return any(one.plans_on_host for one in self._collections)

    def exchange(self, batches: Iterable[object]) -> None:
        """Send the keys of batches that wait, each once, to the processes that hold their rows.

        Args:
            batches: in order; an error in place of one that could not be read, None behind the last one.
        """
        for batch in batches:
            if batch is not None:
                for one in self._sharded:
                    one.exchange(batch)

    def announce(self, batch: Batch, host: Batch | None = None) -> bool:
        """Start fetching a batch's rows; return False if it is too early, also for later batches.

        Args:
            batch: what the module will be called with, after its `exchange`.
            host: the same batch in host memory, where `batch` is on a GPU and `needs_host` holds.
        """
        own = all(one.resolve_ahead(batch, host) for one in self._collections)
        return own and all(one.fetch(batch) for one in self._sharded)

    def forget(self, batch: Batch) -> None:
        """Release a batch whose step has finished or was never run."""
        for one in self._collections:
            one.forget_ahead(batch)
        for other in self._sharded:
            other.forget(batch)

    def end(self) -> None:
        """Release all batches."""
        for one in self._collections:
            one.end_ahead()
        for other in self._sharded:
            other.end()
