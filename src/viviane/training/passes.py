"""Training in passes: batches of one sub-data-set after the other, and the rows of each in memory before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from viviane.batch import Batch
from viviane.core.errors import CheckpointError
from viviane.core.logging import get_logger
from viviane.data import DataPasses
from viviane.data.key_sets import KeySets
from viviane.embedding import TableCollection, TableConfig, TableStorage
from viviane.embedding.keys import rows_of_keys
from viviane.embedding.module_parts import collections_of
from viviane.embedding.slot_cache import PassMove
from viviane.training.checkpoint.table_parts import parts_of
from viviane.training.feed import DeviceFeed
from viviane.training.look_ahead import LookAhead

_log = get_logger("training.passes")


def begin_pass(module: nn.Module, keys: Mapping[str, Any]) -> PassMove:
    """Bring the rows and optimizer state that keys need into memory, and write those that leave; for tables in tiers.

    A loop of your own calls it before the first batch of each sub-data-set. Bits do not depend on it: rows of keys
    that are not named are fetched when a batch has them.

    Args:
        module: its tables in tiers are served.
        keys: by feature, whole numbers (n,), in any order; features that are not named keep nothing in memory.

    Raises:
        CacheFullError: the rows of a table do not fit into its memory.
    """
    moved = PassMove()
    for collection in collections_of(module).values():
        for storage, rows in _rows_of_storages(collection, keys):
            moved += storage.begin_pass(rows)
    return moved


def tiered_storages(module: nn.Module) -> list[TableStorage]:
    """Return the storages of a module that have tables in tiers."""
    return [
        storage
        for collection in collections_of(module).values()
        for part in collection.parts()
        for storage in part.all_storages()
        if storage.in_tiers
    ]


def _rows_of_storages(
    collection: TableCollection, keys: Mapping[str, Any]
) -> Iterator[tuple[TableStorage, dict[str, Any]]]:
    """Yield the storages of a collection that have tables in tiers, and the rows of each such table, rising."""
    found: dict[TableStorage, dict[str, Any]] = {}
    for name, table in collection.tables.items():
        if not isinstance(table, TableConfig):
            continue
        given = [keys[one.name] for one in collection.features.values() if one.table == name and one.name in keys]
        rows: Any = np.zeros(0, np.int64)
        if given:
            every = torch.from_numpy(np.concatenate([np.asarray(one, np.int64) for one in given]))
            rows = np.unique(rows_of_keys(every, table).numpy())
        for part in parts_of(collection, name):
            if part.storage is not None and name in part.storage.tiered_tables() and part.keys:
                own = found.setdefault(part.storage, {})
                inside = rows[(rows >= part.keys.start) & (rows < part.keys.stop)] - part.keys.start
                own[name] = inside[inside % part.keys.step == 0] // part.keys.step
    yield from found.items()


class PassFeed:
    """Iterates over the batches of `DataPasses`: before those of a sub-data-set, its rows come into memory.

    It has what the training loop uses of a `DeviceFeed`. An epoch ends after the last sub-data-set.

    Args:
        passes: the sub-data-sets.
        feeds: of their batches, in their order.
        module: its tables in tiers get the rows of each pass; None: only batches are wanted.
    """

    has_length = True

    def __init__(self, passes: DataPasses, feeds: Sequence[DeviceFeed], module: nn.Module | None) -> None:
        self.passes, self.feeds, self.module = passes, list(feeds), module
        self._part, self._epoch = 0, feeds[0].epoch

    @classmethod
    def open(cls, passes: DataPasses, *where: Any, module: nn.Module | None = None, **options: Any) -> Self:
        """Open the feeds of all parts; arguments as of `DeviceFeed.open`."""
        return cls(passes, [DeviceFeed.open(one.data, *where, **options) for one in passes.parts], module)

    def __len__(self) -> int:
        return sum(len(feed) for feed in self.feeds)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def look_ahead(self) -> LookAhead | None:
        """Receives batches that are read ahead."""
        return self.feeds[0].look_ahead

    @look_ahead.setter
    def look_ahead(self, given: LookAhead | None) -> None:
        for feed in self.feeds:
            feed.look_ahead = given

    @property
    def share_of_whole(self) -> int | None:
        """Rows of the local batch of a full batch; None if ranks differ."""
        return self.feeds[0].share_of_whole

    @property
    def is_whole(self) -> bool:
        """Whether the last global batch was full."""
        return self.feeds[self._part].is_whole

    def read_on(self, until_epoch: int) -> None:
        """Do nothing: the next epoch begins with another sub-data-set."""

    def __iter__(self) -> Iterator[Batch]:
        """Continue at the current position."""
        while self._part < len(self.feeds):
            feed = self.feeds[self._part]
            if feed.epoch == self._epoch:
                if feed.position < len(feed):
                    self._begin()
                yield from feed
                if feed.epoch == self._epoch:  # a request to stop ended it
                    return
            self._part += 1
        self._part, self._epoch = 0, self._epoch + 1

    def _begin(self) -> None:
        if self.module is None or not tiered_storages(self.module):
            return
        start, number = perf_counter(), self._part
        keys: KeySets = self.passes.parts[number].key_sets()
        known = perf_counter()
        moved = begin_pass(self.module, keys)
        _log.info(
            "pass %d of %d of epoch %d: %d rows, %d read and %d written in %.2f s (keys: %.2f s)", number + 1,
            len(self.feeds), self._epoch, moved.rows, moved.read, moved.written, perf_counter() - known, known - start,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return the position after the batches that were yielded."""
        return {"passes": len(self.feeds), "part": self._part, "epoch": self._epoch,
                "reader": self.feeds[self._part].state()}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after those yielded when `state` was taken.

        Raises:
            CheckpointError: it is the position of a run over other data.
        """
        part, epoch = state.get("part"), state.get("epoch")
        if state.get("passes") != len(self.feeds):
            raise CheckpointError(
                "the saved position belongs to another number of passes", value=state.get("passes", "no passes"),
                allowed=str(len(self.feeds)), fix="resume with the sub-data-sets of the run that was saved",
            )  # fmt: skip
        if not (isinstance(part, int) and isinstance(epoch, int) and 0 <= part < len(self.feeds) and epoch >= 0):
            raise CheckpointError("not a position in passes", value=f"pass {part!r}, epoch {epoch!r}")
        for place, feed in enumerate(self.feeds):
            if place != part:
                feed.set_epoch(epoch + (place < part))
        self.feeds[part].restore(state["reader"])
        self._part, self._epoch = part, epoch

    def close(self) -> None:
        """Stop all readers and keep the position."""
        for feed in self.feeds:
            feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
