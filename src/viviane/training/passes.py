"""Training in passes: batches of one sub-data-set after the other, and the rows of each in memory before it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError
from viviane.core.logging import get_logger
from viviane.data import DataPasses
from viviane.embedding import TableCollection, TableConfig, TableStorage
from viviane.embedding.keys import rows_of_keys
from viviane.embedding.module_parts import collections_of
from viviane.embedding.slot_cache import PassMove
from viviane.training.checkpoint.table_parts import parts_of
from viviane.training.feed import DeviceFeed
from viviane.training.look_ahead import LookAhead

_MOST_AHEAD: Final = 16
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


class PassPlan:
    """Passes whose keys are known ahead: rows that leave are written where a later pass reads all of its rows at once.

    A loop of your own calls `begin` before the first batch of each sub-data-set, in turn; the first follows the last.
    Bits do not depend on it. Memory: a bit for each row of a table in tiers and each of the passes to come, at most 16.

    Args:
        module: its tables in tiers are served.
        keys: of each pass, by feature as `begin_pass` takes them, or a function that returns them when they are needed.

    Raises:
        ConfigError: there are no passes.
    """

    def __init__(self, module: nn.Module, keys: Sequence[Mapping[str, Any] | Callable[[], Mapping[str, Any]]]) -> None:
        if not keys:
            raise ConfigError("a plan needs passes", value="an empty list")
        self._module, self._keys = module, list(keys)
        self._sets: dict[int, dict[TableStorage, dict[str, NDArray[np.uint8]]]] = {}

    def prepare(self, number: int) -> None:
        """Find the rows of a pass and of those after it, by the keys; `begin` does so, too."""
        ahead = self._ahead(number)
        self._sets = {one: found for one, found in self._sets.items() if one == number or one in ahead}
        for one in (number, *ahead):
            if one not in self._sets:
                keys = self._keys[one]
                self._sets[one] = _row_sets(self._module, keys() if callable(keys) else keys)

    def begin(self, number: int) -> PassMove:
        """Bring the rows and optimizer state of a pass into memory; see `begin_pass`.

        Args:
            number: of the pass, from 0.

        Raises:
            CacheFullError: the rows of a table do not fit into its memory.
        """
        self.prepare(number)
        moved = PassMove()
        for storage, sets in self._sets[number].items():
            rows = {name: np.flatnonzero(np.unpackbits(bits, bitorder="little")) for name, bits in sets.items()}
            moved += storage.begin_pass(rows, [self._sets[one][storage] for one in self._ahead(number)])
        return moved

    def _ahead(self, number: int) -> list[int]:
        """Return the passes that follow, the next one first; the last is this one, an epoch later."""
        return [(number + i) % len(self._keys) for i in range(1, min(_MOST_AHEAD, len(self._keys)) + 1)]


def _row_sets(module: nn.Module, keys: Mapping[str, Any]) -> dict[TableStorage, dict[str, NDArray[np.uint8]]]:
    """Return a bit for each row of the tables in tiers, set where keys need it."""
    found: dict[TableStorage, dict[str, NDArray[np.uint8]]] = {}
    for collection in collections_of(module).values():
        for storage, rows in _rows_of_storages(collection, keys):
            found[storage] = {}
            for name, own in rows.items():
                needed = np.zeros(storage.tiered_tables()[name].num_rows, np.bool_)
                needed[own] = True
                found[storage][name] = np.packbits(needed, bitorder="little")
    return found


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
            rows = _distinct(rows_of_keys(every, table).numpy())
        for part in parts_of(collection, name):
            if part.storage is not None and name in part.storage.tiered_tables() and part.keys:
                own = found.setdefault(part.storage, {})
                inside = rows[(rows >= part.keys.start) & (rows < part.keys.stop)] - part.keys.start
                own[name] = inside[inside % part.keys.step == 0] // part.keys.step
    yield from found.items()


def _distinct(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return distinct rows, rising; files of keys have them so."""
    return rows if bool((rows[1:] > rows[:-1]).all()) else np.unique(rows)


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
        self._plan = None if module is None else PassPlan(module, [one.key_sets for one in passes.parts])

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
        if self._plan is None or self.module is None or not tiered_storages(self.module):
            return
        start, number = perf_counter(), self._part
        self._plan.prepare(number)
        known = perf_counter()
        moved = self._plan.begin(number)
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
