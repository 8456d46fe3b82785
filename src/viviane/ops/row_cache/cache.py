"""The row cache of the CPU: memory, the turns of writers, and which rows make room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, MachineError

Eviction = Literal["oldest", "random"]
_META: Final = 4
_LEAST_SPARE: Final = 64
_MOST_PLACES: Final = (1 << 32) - 16


class RowCache:
    """A bounded map from int64 keys to rows, in host memory. `find` takes no lock.

    Memory is taken from the machine as places are filled, so that a cache larger than its table costs what the table
    takes. Every key finds a place until `capacity` keys are there: a cache as large as its table holds all of it.

    Args:
        capacity: most rows; one fiftieth more (at least 64 places) is there for rows that are being replaced.
        row_bytes: of a row, a multiple of 8.
        eviction: which rows make room: those used longest ago, or any.
        resolution: to which share of `capacity` rows are removed when it is reached.

    Raises:
        ConfigError: a number is out of range.
        MachineError: there is no address space for so many rows.

    Example:
        >>> cache = RowCache(capacity=10, row_bytes=8)
        >>> cache.insert(np.array([7, -1]), np.arange(16, dtype=np.uint8).reshape(2, 8))
        2
        >>> out = np.zeros((2, 8), np.uint8)
        >>> cache.find(np.array([-1, 5]), out).tolist(), int(out[0, 0]), len(cache)
        ([True, False], 8, 2)
    """

    def __init__(
        self, capacity: int, row_bytes: int, *, eviction: Eviction = "oldest", resolution: float = 0.98
    ) -> None:
        if capacity < 1 or row_bytes < 8 or row_bytes % 8 or not 0 < resolution <= 1:
            value = f"capacity {capacity}, row_bytes {row_bytes}, resolution {resolution}"
            raise ConfigError("a cache cannot be made so", value=value, allowed="1 or more, multiples of 8, (0, 1]")
        spare = max(_LEAST_SPARE, capacity // 50)
        places = capacity + spare
        if places > _MOST_PLACES:
            raise ConfigError("a cache has too many rows", value=capacity, allowed=f"{_MOST_PLACES:,}")
        self.capacity, self.row_bytes, self.eviction, self.resolution = capacity, row_bytes, eviction, resolution
        self._num_places = places
        slots = 1 << (2 * places - 1).bit_length()
        try:
            self._index: NDArray[np.int64] = np.zeros(slots, np.int64)
            self._meta = np.zeros((places, _META), np.int64)
            self._memory = np.zeros(places * row_bytes + 64, np.uint8)
        except (MemoryError, ValueError) as error:
            value = f"{places * row_bytes:,} bytes"
            raise MachineError("no memory for a cache", value=value, fix="choose a smaller capacity") from error
        self._meta[:, 3] = -1
        self._rows = self._memory.ctypes.data + -self._memory.ctypes.data % 64
        self._ring = np.arange(places, dtype=np.int64)
        self._state = np.array([0, 0, places, 0, 0, places, 0], np.int64)
        self._turn = threading.Lock()
        self._random = np.random.default_rng(0)
        self.num_evicted = 0

    def __len__(self) -> int:
        return int(self._state[3])

    @property
    def num_bytes(self) -> int:
        """Bytes of address space; memory is taken as places are filled."""
        return self._index.nbytes + self._meta.nbytes + len(self._memory) + self._ring.nbytes

    # Reading ----------------------------------------------------------------------------------------------------

    def find(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the rows of keys to `out` and return which were there; other rows of `out` stay as they are.

        Args:
            keys: (n,), int64, contiguous.
            out: (n, row_bytes), uint8; rows may be further apart, such as columns of a wider matrix.

        Raises:
            ConfigError: an array has another form, or `out` is read-only.
        """
        from viviane.ops.row_cache import cpu

        self._check(keys, out)
        if not out.flags.writeable or (len(keys) > 1 and abs(out.strides[0]) < self.row_bytes):
            raise ConfigError("rows cannot be written here", value=f"writeable {out.flags.writeable}, {out.strides}")
        found = np.empty(len(keys), np.bool_)
        index = self._index  # kept alive while it is read, whatever a writer puts in its place
        cpu.find(
            keys.ctypes.data, len(keys), len(index) - 1, index.ctypes.data, self._meta.ctypes.data, self._rows,
            self.row_bytes, out.ctypes.data, out.strides[0], found.ctypes.data, int(time.monotonic() * 1000),
        )  # fmt: skip
        return found

    # Writing ----------------------------------------------------------------------------------------------------

    def insert(
        self, keys: NDArray[np.int64], rows: NDArray[np.uint8], *, only: Literal["all", "present", "absent"] = "all"
    ) -> int:
        """Put rows in, and return how many keys are there now; of several rows of one key the last counts.

        Args:
            keys: (n,).
            rows: (n, row_bytes), contiguous.
            only: "present" replaces rows of keys that are there; "absent" leaves those alone.

        Raises:
            ConfigError: an array has another form.
        """
        from viviane.ops.row_cache import cpu

        self._check(keys, rows)
        keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
        modes = {"all": 0, "present": 1, "absent": 2}
        done, count = 0, len(keys)
        with self._turn:
            while done < count:
                # Places beyond the capacity are for rows on their way: a step never fills them for good.
                room = max(1, self.capacity - len(self))
                step = min(count - done, room if only != "present" else count)
                if only != "present" and len(self) >= self.capacity:
                    self._make_room(min(count - done, self.capacity))
                    continue
                self._state[6] = int(time.monotonic() * 1000)
                done += cpu.insert(
                    keys.ctypes.data + 8 * done, rows.ctypes.data + self.row_bytes * done, step,
                    len(self._index) - 1, self._index.ctypes.data, self._meta.ctypes.data, self._rows, self.row_bytes,
                    self._ring.ctypes.data, self._state.ctypes.data, modes[only],
                )  # fmt: skip
                self._tidy()
            return len(self)

    def erase(self, keys: NDArray[np.int64]) -> int:
        """Remove keys, and return how many were there."""
        from viviane.ops.row_cache import cpu

        self._check_keys(keys)
        keys = np.ascontiguousarray(keys)
        with self._turn:
            removed = cpu.erase(
                keys.ctypes.data, len(keys), len(self._index) - 1, self._index.ctypes.data, self._meta.ctypes.data,
                self._ring.ctypes.data, self._state.ctypes.data,
            )  # fmt: skip
            self._tidy()
        return int(removed)

    def _check(self, keys: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Refuse arrays that compiled code would read or write beyond their ends."""
        self._check_keys(keys)
        wanted = (len(keys), self.row_bytes)
        if (
            not isinstance(rows, np.ndarray)
            or rows.dtype != np.uint8
            or rows.shape != wanted
            or (rows.size and rows.strides[1] != 1)
        ):
            raise ConfigError("rows have another form", value=_form(rows), allowed=f"uint8 {wanted}, each contiguous")

    def _check_keys(self, keys: NDArray[np.int64]) -> None:
        is_array = isinstance(keys, np.ndarray) and not isinstance(keys, np.ma.MaskedArray)
        if not is_array or keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
            raise ConfigError("keys have another form", value=_form(keys), allowed="int64 (n,), C-contiguous")

    def clear(self) -> None:
        """Remove all rows."""
        with self._turn:
            self._evict(np.flatnonzero(self._meta[:, 3] >= 0))
            self._tidy()

    def evict_older(self, seconds: float) -> int:
        """Remove rows that were not read for that long, and return how many."""
        with self._turn:
            before = int((time.monotonic() - seconds) * 1000)
            removed = self._evict(np.flatnonzero((self._meta[:, 3] >= 0) & (self._meta[:, 2] < before)))
            self._tidy()
        return removed

    def _make_room(self, wanted: int) -> None:
        """Remove rows, down to `resolution` and for at least one of those wanted."""
        count = min(len(self), max(1, min(wanted, self.capacity // 8), int(self.capacity * (1 - self.resolution))))
        held = np.flatnonzero(self._meta[:, 3] >= 0)
        if self.eviction == "random":
            victims = self._random.choice(held, count, replace=False)
        else:
            used = self._meta[held, 2]
            victims = held[np.argpartition(used, count - 1)[:count]] if count < len(held) else held
        self.num_evicted += self._evict(victims)
        self._tidy()

    def _evict(self, places: NDArray[Any]) -> int:
        from viviane.ops.row_cache import cpu

        places = np.ascontiguousarray(places, np.int64)
        return int(cpu.evict(
            places.ctypes.data, len(places), self._index.ctypes.data, self._meta.ctypes.data, self._ring.ctypes.data,
            self._state.ctypes.data,
        ))  # fmt: skip

    def _tidy(self) -> None:
        """Make a new index where a quarter of the old one is entries of erased keys."""
        from viviane.ops.row_cache import cpu

        if self._state[4] > len(self._index) // 4:
            index = np.zeros_like(self._index)
            cpu.rebuild(self._num_places, len(index) - 1, index.ctypes.data, self._meta.ctypes.data)
            self._state[4] = 0
            self._index = index

    # All of it --------------------------------------------------------------------------------------------------

    def keys(self) -> NDArray[np.int64]:
        """Return the keys that are there, those used last first."""
        with self._turn:
            held = self._meta[:, 3] >= 0
            keys, used = self._meta[held, 0], self._meta[held, 2]
        found: NDArray[np.int64] = keys[np.argsort(-used, kind="stable")]
        return found

    def scan(self, batch_rows: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield keys and rows, each key that is there once."""
        keys = self.keys()
        for start in range(0, len(keys), batch_rows):
            part = keys[start : start + batch_rows]
            rows = np.empty((len(part), self.row_bytes), np.uint8)
            found = self.find(part, rows)
            yield part[found], rows[found]


def _form(value: Any) -> str:
    is_array = isinstance(value, np.ndarray)
    return f"{value.dtype} {value.shape}, strides {value.strides}" if is_array else type(value).__name__
