"""The contract of a tier: rows by 64-bit key in one place, read and written in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.statistics import TierStats

SCAN_ROWS = 65_536


def check_batch_rows(batch_rows: int) -> None:
    """Refuse a number of rows by which a scan would not advance.

    Raises:
        ConfigError: it is no whole number from 1 on.
    """
    if not isinstance(batch_rows, int) or isinstance(batch_rows, bool) or batch_rows < 1:
        raise ConfigError("a batch has at least one row", where="batch_rows", value=batch_rows, allowed="1 or more")


@runtime_checkable
class Tier(Protocol):
    """Rows by key in one place: memory, files, RocksDB, Redis.

    Keys are int64, (n,); rows are uint8, (n, row_bytes), C-contiguous; `layout` describes the content of a row. Every
    call takes a batch. A tier has no reference to another tier; `viviane.store.stack` stacks several.

    Threads: all methods may be called from several threads. Calls that change rows take turns. `fetch` may run beside
    them: each row that it returns is the row before or after a change, never a mixture. Kernels, files and clients
    release the GIL.

    Order: what `put` or `erase` returned from is seen by every later `fetch` of this process. It is on disk, where
    the tier has one, when `flush` has returned; after a crash a tier has every row of the last `flush`, and of later
    changes some, each whole.

    Repeated keys: `fetch` may be called with them; of several rows of one key in a `put` the last one counts.

    Attributes:
        name: of the tier, in messages and statistics.
        layout: of its rows.
    """

    name: str
    layout: RowLayout

    def fetch(self, keys: Keys, out: Rows) -> Found:
        """Copy rows to `out` and return which were found, bool (n,); rows of `out` that were not stay as they are.

        Args:
            keys: (n,).
            out: (n, row_bytes).

        Raises:
            StoreError: the place cannot be read, or what is read is damaged.
        """

    def put(self, keys: Keys, rows: Rows) -> None:
        """Insert rows, or replace those of keys that are there.

        Args:
            keys: (n,).
            rows: (n, row_bytes).

        Raises:
            StoreError: the place cannot be written to, or is full; rows that were there are unchanged then.
        """

    def erase(self, keys: Keys) -> int:
        """Remove keys and return how many were there; keys that are not there are no error."""

    def scan(self, batch_rows: int = SCAN_ROWS) -> Iterator[tuple[Keys, Rows]]:
        """Yield all keys with their rows, up to `batch_rows` at once, each key once, in any order.

        Rows that are changed meanwhile come in the old or the new form; rows inserted or erased meanwhile may come or
        not. What is yielded belongs to the caller.
        """

    def num_rows(self) -> int:
        """Return the number of keys; some tiers, which say so, estimate it between flushes."""

    def stats(self) -> TierStats:
        """Return what was counted since the tier was opened."""

    def flush(self) -> None:
        """Return when all changes are where they survive a crash; where nothing does, at once."""

    def close(self) -> None:
        """Flush and let go of files and memory; other calls fail from then on. May be called again."""


@dataclass(frozen=True)
class Exchange:
    """Rows that go to a tier, and rows that come from it, with a change of passes.

    Args:
        leaving: ids, (n,), rising.
        give: writes the rows of some places, (k,), in `leaving` into (k, row_bytes); called once for each place, from
            several threads.
        coming: ids, (m,), rising, none of them leaving.
        take: receives some places, (k,), in `coming`, rows, (r, row_bytes), and which lines of these are theirs, (k,).
            The rows are used again.
        given_before: (m,), rising by 0 or 1: where it rises, the row takes the place of that row of `leaving`, which
            must be given before.
        later: (n,), of each row of `leaving` the number of the later pass that needs it first; -1: it is not known.
            None: of no row.
    """

    leaving: Keys
    give: Callable[[NDArray[np.int64], Rows], None]
    coming: Keys
    take: Callable[[NDArray[np.int64], Rows, NDArray[np.int64]], None]
    given_before: NDArray[np.int64]
    later: NDArray[np.int16] | None = None

    def part(self, leaving: NDArray[np.int64], coming: NDArray[np.int64], positions: NDArray[np.int64]) -> Exchange:
        """Return an exchange of some rows, when the other ones of `leaving` have been given.

        Args:
            leaving: rising places in `leaving`.
            coming: places in `coming`.
            positions: where those rows stand in the tier, rising.
        """
        count = np.zeros(len(self.leaving) + 1, np.int64)
        count[leaving + 1] = 1
        before = np.cumsum(count)[self.given_before[coming]]
        return Exchange(
            self.leaving[leaving], lambda places, rows: self.give(leaving[places], rows), positions,
            lambda places, rows, lines: self.take(coming[places], rows, lines), before,
        )  # fmt: skip


@runtime_checkable
class Exchanging(Protocol):
    """A tier that writes and reads the rows of a change of passes together, faster than `put` and then `fetch`."""

    def exchange(self, change: Exchange) -> Found:
        """Write the rows that leave and read those that come, the same rows as `put` and then `fetch` would.

        Returns:
            (m,), which rows of `change.coming` were there and taken.

        Raises:
            StoreError: the place cannot be read or written, or is full.
        """
