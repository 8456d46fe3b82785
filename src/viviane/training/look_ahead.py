"""Prefetch of table rows in tiers for the batches that wait for their step."""

from __future__ import annotations

from torch import nn

from viviane.batch import Batch
from viviane.embedding import EmbeddingCollection
from viviane.embedding.module_parts import collections_of


class LookAhead:
    """Announces batches to the collections of a module that have tables in tiers.

    Args:
        module: the module to train.
        num_batches: number of batches that are announced before their step.

    Example:
        >>> LookAhead(nn.Linear(1, 1)).is_needed
        False
    """

    def __init__(self, module: nn.Module, num_batches: int = 3) -> None:
        self.num_batches = num_batches
        self._collections = [
            one for one in collections_of(module).values() if isinstance(one, EmbeddingCollection) and one.looks_ahead
        ]

    @property
    def is_needed(self) -> bool:
        """Whether a collection can prefetch rows; those of several processes cannot."""
        return bool(self._collections)

    @property
    def needs_host(self) -> bool:
        """Whether batches on a GPU are announced with the same keys in host memory."""
        return any(one.plans_on_host for one in self._collections)

    def announce(self, batch: Batch, host: Batch | None = None) -> bool:
        """Start fetching a batch's rows; return False if it is too early, also for later batches.

        Args:
            batch: what the module will be called with.
            host: the same batch in host memory, where `batch` is on a GPU and `needs_host` holds.
        """
        return all(one.resolve_ahead(batch, host) for one in self._collections)

    def forget(self, batch: Batch) -> None:
        """Release a batch whose step has finished or was never run."""
        for one in self._collections:
            one.forget_ahead(batch)

    def end(self) -> None:
        """Release all batches."""
        for one in self._collections:
            one.end_ahead()
