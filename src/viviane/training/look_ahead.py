"""Batches that wait for their step: the rows of their tables in tiers are fetched before."""

from __future__ import annotations

from torch import nn

from viviane.batch import Batch
from viviane.embedding import EmbeddingCollection
from viviane.embedding.module_parts import collections_of


class LookAhead:
    """Announces batches to the collections of a module that have tables in tiers.

    Args:
        module: to be trained.
        num_batches: that are announced before their step.

    Example:
        >>> LookAhead(nn.Linear(1, 1)).is_needed
        False
    """

    def __init__(self, module: nn.Module, num_batches: int = 3) -> None:
        self.num_batches = num_batches
        self._collections = [
            one
            for one in collections_of(module).values()
            if isinstance(one, EmbeddingCollection) and one.has_tiers and one.device.type == "cpu"
        ]

    @property
    def is_needed(self) -> bool:
        """Whether a collection fetches rows ahead: a GPU's collections, and those of several processes, do not."""
        return bool(self._collections)

    def announce(self, batch: Batch) -> bool:
        """Begin to fetch a batch's rows; False where it is too early, so that later batches need not be tried."""
        return all(one.resolve_ahead(batch) for one in self._collections)

    def forget(self, batch: Batch) -> None:
        """Let a batch go whose step is over, or never came."""
        for one in self._collections:
            one.forget_ahead(batch)

    def end(self) -> None:
        """Let all batches go."""
        for one in self._collections:
            one.end_ahead()
