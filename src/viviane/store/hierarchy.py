"""One table over its tiers, for serving: fastest first, every tier may be absent or fail.

    cache, host, Redis    copies ("volatile"): may lack any key; filled from below beside lookups
    RocksDB, or host      the rows as they are now ("store")
    snapshot              the rows as they were saved ("base"), where nothing newer is known

A change is written from the bottom to the top, and copies are filled under the same lock. The current row of a key is
that of the highest tier that has the key. A lookup that overlaps with a change therefore asks the copies again for the
keys that it took from lower tiers: a copy may have been filled after it was asked, and not be changed yet. So a reader
that has seen a row never sees an older one. A copy that has missed a change is not read until it has made up for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

import numpy as np

from viviane.core.errors import ConfigError, MachineError, StoreError
from viviane.store.circuit import CircuitBreaker
from viviane.store.mover import Mover
from viviane.store.row_layout import Found, Keys, RowLayout, Rows
from viviane.store.tier import Tier

Role = Literal["volatile", "store", "base"]
Default = Callable[[Keys, Rows], None]
"""Writes the rows of keys that no tier has."""
_MOST_MISSED: Final = 1 << 20
_EVICTION_SECONDS: Final = 1.0
_MOST_USED: Final = 1 << 20
_NO_PLACES: Final = np.empty(0, np.int64)


@runtime_checkable
class Bounded(Protocol):
    """A tier that holds some rows only: it can replace those that are there and fill in those that are not."""

    def replace(self, keys: Keys, rows: Rows) -> None:
        """Replace the rows of those keys that are there."""

    def fill(self, keys: Keys, rows: Rows) -> None:
        """Insert rows of those keys that are not there."""


@runtime_checkable
class Evicting(Protocol):
    """A tier whose rows are removed beside lookups when there are too many."""

    notes_use: bool
    """Whether it removes rows by their time of use, which `touch` sets."""

    def touch(self, keys: Keys) -> None:
        """Note that keys were used now."""

    def make_room(self) -> int:
        """Remove rows beyond the bound, and return how many."""


@runtime_checkable
class Noting(Protocol):
    """A tier that writes changes and small notes, such as applied positions, in one piece."""

    def apply(self, keys: Keys, rows: Rows, erased: Keys, notes: Mapping[str, bytes]) -> None:
        """Insert or replace rows, remove keys and write notes, all or none."""

    def note(self, name: str) -> bytes | None:
        """Return a note, or None."""


@dataclass
class Level:
    """A tier in a hierarchy.

    Args:
        tier: of the table.
        role: a copy, the store, or the base.
        breaker: leaves it alone for a while when it fails.
        fills: of a copy: whether lookups insert the rows that it lacked; `warm` does so in any case.
    """

    tier: Tier
    role: Role
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    fills: bool = True
    missed: list[Keys] = field(default_factory=list)
    """Keys whose change it has missed; it is not read until they are made up for."""
    num_missed: int = 0
    hits: int = 0
    misses: int = 0
    skipped: int = 0
    """Keys that it was not asked for because it failed."""
    evicted_at: float = 0.0
    """When its rows were last counted, on the monotonic clock."""
    used: list[Keys] = field(default_factory=list)
    """Keys that were used since then, where it removes rows by their time of use."""
    num_used: int = 0


@dataclass(frozen=True)
class Lookup:
    """What became of the keys of one call.

    Args:
        found: (n,), which keys a tier had; the others read the default.
        num_degraded: keys whose answer may not be the newest row, or is the default, because a tier failed.
        num_deferred: keys that read the default since the hit rate was good enough, and are fetched beside it.
    """

    found: Found
    num_degraded: int = 0
    num_deferred: int = 0


@dataclass(frozen=True)
class Begun:
    """The state of a hierarchy before a lookup.

    Args:
        epoch, ended: changes so far, begun and ended.
        is_readable: whether the first level may be asked.
    """

    epoch: int
    ended: int
    is_readable: bool


class TableHierarchy:
    """The tiers of one table.

    Args:
        name: of the table.
        layout: of its rows.
        levels: fastest first.
        default: writes rows of keys that no tier has; None: zeros.
        strict: raise where a tier that fails may hold the answer, instead of a degraded one.
        hit_rate_threshold: share of a call's keys that the first level has to have for the others to read the default
            and be fetched beside the call; 1.0: every answer is exact.
        deadline_ms: how long a call waits for lower levels; None: as long as they take.
        mover: fills copies beside lookups.
        pool: threads for calls with a deadline.

    Raises:
        ConfigError: levels that would lose updates.
    """

    def __init__(
        self,
        name: str,
        layout: RowLayout,
        levels: Sequence[Level],
        *,
        default: Default | None = None,
        strict: bool = False,
        hit_rate_threshold: float = 1.0,
        deadline_ms: float | None = None,
        mover: Mover | None = None,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        roles = [level.role for level in levels]
        if not levels or sorted(roles, key=["volatile", "store", "base"].index) != roles or roles.count("store") > 1:
            raise ConfigError("tiers in an order that cannot be", where=f"table {name!r}", value=", ".join(roles),
                              allowed="copies, then one store, then bases")  # fmt: skip
        if deadline_ms is not None and pool is None:
            raise ConfigError("a deadline needs threads to keep it", where=f"table {name!r}")
        self.name, self.layout, self.levels = name, layout, list(levels)
        self.strict, self.hit_rate_threshold, self.deadline_ms = strict, hit_rate_threshold, deadline_ms
        self.default: Default = default or _zeros
        self.mover, self._pool = mover, pool
        self._writing = threading.RLock()
        self._epoch = 0
        self._num_begun = self._num_ended = 0  # changes
        self.num_degraded = self.num_deferred = self.num_defaults = 0
        self._evicting = [level for level in self.levels if isinstance(level.tier, Evicting)]

    # Lookup -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Keys, out: Rows) -> Lookup:
        """Copy the rows of keys to `out`; keys that no tier has read the default.

        Args:
            keys: (n,), int64, contiguous.
            out: (n, row_bytes), uint8; rows may lie apart, columns may not.

        Raises:
            StoreError: in strict mode, a tier that may have an answer fails.
        """
        first = self.levels[0]
        if not out.flags.c_contiguous and not isinstance(first.tier, Bounded):
            rows = self.layout.empty(len(keys))
            result = self.lookup(keys, rows)
            out[:] = rows
            return result
        ended = self._num_ended
        found, failed = self._ask(first, keys, out)
        hits = int(np.count_nonzero(found))
        if self._evicting and self._evicting[0] is first:
            self._note_use(first, keys, found)
        if hits == len(keys):
            self._tend()  # else what is filled in does
            return Lookup(found)
        missing = np.flatnonzero(~found)
        wanted = keys[missing]
        epoch = self._epoch
        if failed is None and first.role == "volatile" and hits >= self.hit_rate_threshold * len(keys):
            return self._deferred(keys, out, found, missing, epoch)
        return self._below(keys, out, found, missing, wanted, (epoch, ended), failed)

    def begin(self) -> Begun:
        """Note the state before a lookup whose first level is asked elsewhere, such as on a GPU; see `complete`."""
        first = self.levels[0]
        readable = not first.missed and not first.num_missed and first.breaker.allows()
        return Begun(self._epoch, self._num_ended, readable)

    def complete(self, keys: Keys, found: Found, begun: Begun) -> tuple[Keys, Rows, Lookup]:
        """Fetch what the first level has not, in a lookup that `begin` began.

        Args:
            keys: (n,), of the lookup.
            found: (n,), which of them the first level had; of a level that was not readable none.
            begun: what `begin` returned.

        Returns:
            The places (m,) of the keys that it had not, their rows, or the default, and what became of them.
        """
        first, failed = self.levels[0], None
        if begun.is_readable and found.all():
            self.count_hits(len(keys))
            return _NO_PLACES, self.layout.empty(0), Lookup(found)
        missing = np.flatnonzero(~found)
        if begun.is_readable:
            first.hits += len(keys) - len(missing)
            first.misses += len(missing)
        else:
            failed = first
            first.skipped += len(keys)
            self._heal_beside(first)
        wanted, rows = np.ascontiguousarray(keys[missing]), self.layout.empty(len(missing))
        own, every = np.zeros(len(missing), np.bool_), np.arange(len(missing))
        good = len(keys) - len(missing) >= self.hit_rate_threshold * len(keys)
        if failed is None and first.role == "volatile" and good:
            result = self._deferred(wanted, rows, own, every, begun.epoch)
        else:
            result = self._below(wanted, rows, own, every, wanted, (begun.epoch, begun.ended), failed)
        return missing, rows, result

    def count_hits(self, num_keys: int) -> None:
        """End a lookup that `begin` began and whose keys the first level all had, the usual one of a warm cache."""
        self.levels[0].hits += num_keys
        self._tend()

    def _note_use(self, level: Level, keys: Keys, found: Found | None = None) -> None:
        """Remember which keys were used, those of `found` alone, where rows are removed by their time of use."""
        if cast(Evicting, level.tier).notes_use and level.num_used < _MOST_USED:
            used = keys if found is None else keys[found]
            level.used.append(used)
            level.num_used += len(used)

    def _tend(self) -> None:
        """Let tiers remove or move rows beside lookups, at most once a second."""
        for level in self._evicting:
            now = time.monotonic()
            if now - level.evicted_at >= _EVICTION_SECONDS and level.breaker.is_closed:
                level.evicted_at = now
                task = partial(self._evict, level, cast(Evicting, level.tier))
                if self.mover is None:
                    task()
                else:
                    self.mover.offer(task, 1)

    def _deferred(self, keys: Keys, out: Rows, found: Found, missing: Keys, epoch: int) -> Lookup:
        """Answer with defaults, and fetch the missing keys beside the call."""
        wanted = keys[missing]
        if self.mover is not None:
            self.mover.offer(lambda: self._fetch_and_fill(wanted, epoch), len(wanted))
        self._write_default(wanted, out, missing)
        self.num_deferred += len(missing)
        return Lookup(found, num_deferred=len(missing))

    def _below(
        self, keys: Keys, out: Rows, found: Found, missing: Keys, wanted: Keys, begin: tuple[int, int],
        failed: Level | None,
    ) -> Lookup:  # fmt: skip
        """Ask the other levels for what the first one has not."""
        epoch, ended = begin
        rows = self.layout.empty(len(wanted))
        if self.deadline_ms is None:
            got, degraded = self._current(wanted, rows, failed, ended)
        else:
            assert self._pool is not None
            task = self._pool.submit(self._current, wanted, rows, failed, ended)
            try:
                got, degraded = task.result(self.deadline_ms / 1000)
            except FutureTimeoutError:
                if self.strict:
                    raise StoreError(
                        "rows did not come in time", where=f"table {self.name!r}", value=f"{len(wanted):,} keys",
                        allowed=f"{self.deadline_ms:g} ms",
                    ) from None  # fmt: skip
                self._write_default(wanted, out, missing)
                self.num_degraded += len(wanted)
                task.add_done_callback(lambda done: self._fill_late(wanted, rows, done, epoch))
                return Lookup(found, num_degraded=len(wanted))
        out[missing[got]] = rows[got]
        found[missing[got]] = True
        if not got.all():
            lost = np.flatnonzero(~got)
            self._write_default(wanted[lost], out, missing[lost])
        self.num_degraded += degraded
        self._fill_beside(wanted[got], rows[got], epoch)
        return Lookup(found, degraded)

    def _current(self, keys: Keys, out: Rows, failed: Level | None, ended: int) -> tuple[Found, int]:
        """Ask the levels below the first; if a change overlapped since `ended` had ended, ask copies again."""
        found, degraded = self._descend(keys, out, 1, failed)
        if self._num_begun == ended:
            return found, degraded
        for level in reversed(self.levels):
            if level.role != "volatile" or level.num_missed or not level.breaker.is_closed:
                continue
            rows = self.layout.empty(len(keys))
            got, _ = self._ask(level, keys, rows)
            out[got] = rows[got]
            found |= got
        return found, degraded

    def _descend(self, keys: Keys, out: Rows, start: int, failed: Level | None) -> tuple[Found, int]:
        """Ask level after level; returns which keys were found, and how many answers are degraded."""
        found = np.zeros(len(keys), np.bool_)
        doubtful = failed is not None and failed.role != "volatile"
        degraded = 0
        for level in self.levels[start:]:
            missing = np.flatnonzero(~found)
            if not len(missing):
                break
            whole = len(missing) == len(keys)
            rows = out if whole else self.layout.empty(len(missing))
            got, broken = self._ask(level, keys[missing], rows)
            if broken is not None:
                failed = broken
                doubtful = doubtful or broken.role != "volatile"
                continue
            if not whole:
                out[missing[got]] = rows[got]
            found[missing[got]] = True
            degraded += int(np.count_nonzero(got)) if doubtful else 0
        if failed is not None:
            # A copy that fails holds nothing that is not below it, unless nothing is below.
            alone = all(level.role == "volatile" for level in self.levels)
            degraded += int(np.count_nonzero(~found)) if doubtful or alone else 0
        if degraded and self.strict and failed is not None:
            raise StoreError(
                "a tier fails, and may hold the rows", where=f"table {self.name!r}, {failed.tier.name}",
                value=failed.breaker.last_error, fix="strict=False answers with what other tiers have",
            )  # fmt: skip
        return found, degraded

    def _ask(self, level: Level, keys: Keys, out: Rows) -> tuple[Found, Level | None]:
        """Fetch from one level; gives the level back where it cannot be read."""
        if level.missed or level.num_missed or not level.breaker.allows():
            level.skipped += len(keys)
            self._heal_beside(level)
            return np.zeros(len(keys), np.bool_), level
        try:
            found = level.tier.fetch(keys, out)
        except (StoreError, MachineError, OSError) as error:
            level.breaker.failed(error)
            level.skipped += len(keys)
            return np.zeros(len(keys), np.bool_), level
        level.breaker.succeeded()
        hits = int(np.count_nonzero(found))
        level.hits += hits
        level.misses += len(keys) - hits
        return found, None

    def _write_default(self, keys: Keys, out: Rows, places: Keys) -> None:
        rows = self.layout.empty(len(keys))
        self.default(keys, rows)
        out[places] = rows
        self.num_defaults += len(keys)

    # Copies -----------------------------------------------------------------------------------------------------

    def _fill_beside(self, keys: Keys, rows: Rows, epoch: int) -> None:
        if self.mover is not None and len(keys) and self.levels[0].role == "volatile":
            self.mover.offer(lambda: self.fill(keys, rows, epoch), len(keys))

    def _fill_late(self, keys: Keys, rows: Rows, task: Any, epoch: int) -> None:
        if task.exception() is None:
            got = task.result()[0]
            self._fill_beside(keys[got], rows[got], epoch)

    def _fetch_and_fill(self, keys: Keys, epoch: int) -> None:
        rows = self.layout.empty(len(keys))
        got, _ = self._descend(keys, rows, 1, None)
        self.fill(keys[got], rows[got], epoch)

    def fill(self, keys: Keys, rows: Rows, epoch: int, *, warming: bool = False) -> None:
        """Insert rows into the copies that lack them; rows read before the last change are read again."""
        keys, places = np.unique(keys, return_index=True)
        rows = rows[places]
        with self._writing:
            if epoch != self._epoch:
                below = next((i for i, one in enumerate(self.levels) if one.role != "volatile"), None)
                assert below is not None  # what was changed is in a store
                rows = self.layout.empty(len(keys))
                got, degraded = self._descend(keys, rows, below, None)
                if degraded:
                    return
                keys, rows = keys[got], rows[got]
            for level in reversed(self.levels):
                wanted = level.role == "volatile" and (level.fills or warming)
                if wanted and not level.num_missed and level.breaker.is_closed:
                    self._guarded(level, lambda tier: _fill(tier, keys, rows))
        for level in self._evicting:
            self._note_use(level, keys)
        self._tend()

    def _evict(self, level: Level, tier: Evicting) -> None:
        """Refresh times of use, and remove rows."""
        used, level.used, level.num_used = level.used, [], 0

        def change(_: Tier) -> None:
            if used:
                tier.touch(np.unique(np.concatenate(used)))
            tier.make_room()

        self._guarded(level, change)

    def _guarded(self, level: Level, change: Callable[[Tier], None]) -> bool:
        try:
            change(level.tier)
        except (StoreError, MachineError, OSError) as error:
            level.breaker.failed(error)
            return False
        return True

    def warm(self, keys: Keys) -> int:
        """Fill the copies with keys that levels below the first have; returns how many."""
        epoch, rows = self._epoch, self.layout.empty(len(keys))
        got, _ = self._descend(keys, rows, 1, None)
        self.fill(keys[got], rows[got], epoch, warming=True)
        return int(np.count_nonzero(got))

    # Changes ----------------------------------------------------------------------------------------------------

    def apply(self, keys: Keys, rows: Rows, erased: Keys, notes: Mapping[str, bytes]) -> None:
        """Write changes and notes to the store in one piece, and bring the copies up to date.

        Args:
            keys, rows: rows to insert or replace; a key at most once.
            erased: keys to remove.
            notes: small values beside the rows, where the store keeps such.

        Raises:
            StoreError: the store cannot be written; nothing was changed then.
        """
        if len(erased) and self.levels[-1].role == "base":
            # The base may have the key: an erased key is one whose row is the default.
            gone = self.layout.empty(len(erased))
            self.default(erased, gone)
            keys, rows, erased = np.concatenate([keys, erased]), np.concatenate([rows, gone]), erased[:0]
        with self._writing:
            store = next((level for level in self.levels if level.role == "store"), None)
            if store is None:
                raise StoreError("no tier keeps changes", where=f"table {self.name!r}", fix="give it a store")
            self._num_begun += 1
            try:
                self._write_store(store.tier, keys, rows, erased, notes)
                self._epoch += 1
                for level in reversed(self.levels):
                    if level.role == "volatile":
                        self._change_copy(level, keys, rows, erased)
            finally:
                self._num_ended = self._num_begun

    def _write_store(self, tier: Tier, keys: Keys, rows: Rows, erased: Keys, notes: Mapping[str, bytes]) -> None:
        if isinstance(tier, Noting):
            tier.apply(keys, rows, erased, notes)
            return
        if len(keys):
            tier.put(keys, rows)
        if len(erased):
            tier.erase(erased)

    def _change_copy(self, level: Level, keys: Keys, rows: Rows, erased: Keys) -> None:
        """Change a copy; of a bounded one those rows that are there."""

        def change(tier: Tier) -> None:
            if len(keys) and isinstance(tier, Bounded):
                tier.replace(keys, rows)
            elif len(keys):
                tier.put(keys, rows)
            if len(erased):
                tier.erase(erased)

        if level.num_missed or not level.breaker.is_closed or not self._guarded(level, change):
            level.num_missed += len(keys) + len(erased)
            if level.num_missed <= _MOST_MISSED:
                level.missed += [keys.copy(), erased.copy()]
            else:
                level.missed = []
            self._heal_beside(level)

    def _heal_beside(self, level: Level) -> None:
        if self.mover is not None and level.num_missed and level.breaker.allows():
            self.mover.offer(lambda: self.heal(level), 1)

    def heal(self, level: Level) -> None:
        """Let a copy make up for changes that it has missed; it is read again then."""
        with self._writing:
            if not level.num_missed:
                return
            below = next((i for i, one in enumerate(self.levels) if one.role != "volatile"), len(self.levels))
            keys = np.unique(np.concatenate([*level.missed, np.empty(0, np.int64)]))
            if level.num_missed > _MOST_MISSED or below == len(self.levels):
                keys = np.concatenate([part for part, _ in level.tier.scan()] or [keys])
            rows = self.layout.empty(len(keys))
            got, degraded = self._descend(keys, rows, below, None)
            if degraded:
                return

            def change(tier: Tier) -> None:
                tier.erase(keys)
                if got.any() and not isinstance(tier, Bounded):
                    tier.put(keys[got], np.ascontiguousarray(rows[got]))

            if self._guarded(level, change):
                level.missed, level.num_missed = [], 0
                level.breaker.succeeded()

    @property
    def takes_notes(self) -> bool:
        """Whether the store keeps notes."""
        return any(level.role == "store" and isinstance(level.tier, Noting) for level in self.levels)

    def note(self, name: str) -> bytes | None:
        """Return a note that `apply` wrote with rows; None where the store has none."""
        store = next((level.tier for level in self.levels if level.role == "store"), None)
        return store.note(name) if isinstance(store, Noting) else None

    # Statistics -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return counts by tier, and of the whole, as plain data."""
        tiers = []
        for level in self.levels:
            own: dict[str, Any] = {"tier": level.tier.name, "role": level.role}
            own |= {"hits": level.hits, "misses": level.misses, "skipped": level.skipped}
            own |= {"available": level.breaker.is_closed and not level.num_missed}
            own |= {"failures": level.breaker.num_failures, "last_error": level.breaker.last_error}
            own |= {name: value for name, value in level.tier.stats().to_json().items() if name not in own}
            tiers.append(own)
        counts = {"degraded": self.num_degraded, "deferred": self.num_deferred, "defaults": self.num_defaults}
        return {"table": self.name, **counts, "tiers": tiers}

    def close(self) -> None:
        """Close all tiers."""
        for level in self.levels:
            level.tier.close()


def _fill(tier: Tier, keys: Keys, rows: Rows) -> None:
    keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
    if isinstance(tier, Bounded):
        cast(Bounded, tier).fill(keys, rows)
    else:
        tier.put(keys, rows)


def _zeros(keys: Keys, rows: Rows) -> None:
    del keys
    rows[:] = 0
