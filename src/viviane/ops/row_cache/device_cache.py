"""The row cache of a GPU: rows in its memory and in the host's behind it, found and copied by one launch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.ops.cuda_driver import synchronize
from viviane.ops.hash_table.reserve import Reserved
from viviane.ops.row_cache.request import LookupRequest, LookupRequests

if TYPE_CHECKING:
    from viviane.ops.row_cache.request_launch import RequestLaunch

_LEAST_SPARE: Final = 64
_BLOCK: Final = 16
_TICKS: Final = 10  # of the clock of last uses, a second
_TABLE_LIMIT: Final = 1 << 31
_Places = NDArray[np.int64]
_Tables = NDArray[np.int32]


@dataclass
class _Pool:
    """Places of one memory: which are free, and how many hold rows."""

    first: int
    capacity: int
    size: int
    free: list[int]
    held: int = 0

    def holds(self, places: _Places) -> NDArray[np.bool_]:
        """Return which places are in this memory."""
        found: NDArray[np.bool_] = (places >= self.first) & (places < self.first + self.size)
        return found


@dataclass
class _Retired:
    """Places that a change has left; lookups that were launched before may still read them."""

    places: _Places
    switched: Any
    readers: list[int] | None = field(default=None)


class DeviceRowCache:
    """A bounded map from keys of tables to rows, on a GPU; `find_into` takes no lock and needs no answer of the CPU.

    The first `capacity` rows lie in the GPU's memory, `host_capacity` more in page-locked memory of the host, which
    the same kernel reads. A row is written to a spare place; then one store of 64 bits names that place in the index.
    A place that a change has left is filled again when all lookups that were launched before have ended.

    Args:
        capacity: most rows in the GPU's memory; a fiftieth more (at least 64) is there for rows that are replaced.
        row_bytes: of a row, a multiple of 4.
        device: a GPU; the CPU for Triton's interpreter alone.
        host_capacity: most rows in the host's memory; 0: none.
        eviction: which rows make room: those used longest ago, to a tenth of a second, or any.

    Raises:
        ConfigError: a number is out of range, or the device is no GPU.
    """

    def __init__(
        self,
        capacity: int,
        row_bytes: int,
        device: torch.device,
        *,
        host_capacity: int = 0,
        eviction: Literal["oldest", "random"] = "oldest",
    ) -> None:
        from viviane.ops.row_cache.gpu_kernels import RECORD_WORDS

        _check(capacity, row_bytes, device, host_capacity)
        self.capacity, self.host_capacity, self.row_bytes, self.device = capacity, host_capacity, row_bytes, device
        self.eviction, self.num_evicted = eviction, 0
        near = _pool(0, capacity)
        far = _pool(near.size, host_capacity)
        self._near, self._far = near, far
        places = near.size + far.size
        num_lines = 1 << max(4, (places // 4).bit_length())
        self._words = row_bytes // 4
        self._memory = Reserved(
            places * self._words, torch.int32, device, near.size * self._words if far.size else None
        )
        self._memory.commit(0, places * self._words)
        self._lines = torch.zeros((num_lines, 8), dtype=torch.int64, device=device)
        self._records = torch.zeros((places, RECORD_WORDS), dtype=torch.int32, device=device)
        self._own_lines = np.zeros((num_lines, 8), np.int64)
        self._own_keys, self._at = np.zeros(places, np.int64), np.full(places, -1, np.int64)
        self._own_tables = np.zeros(places, np.int32)
        self._marks, self._touched = np.zeros(num_lines, np.uint8), np.zeros(num_lines, np.int64)
        self._turn = threading.RLock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._readers: dict[int, Any] = {}
        self._last_reader = iter(range(1 << 62))
        self._retired: deque[_Retired] = deque()
        self._random = np.random.default_rng(0)
        self.requests = LookupRequests(device)

    def __len__(self) -> int:
        return self._near.held + self._far.held

    @property
    def num_device_places(self) -> int:
        """Places below this number are in the GPU's memory, the others in the host's."""
        return self._near.size

    # Reading ----------------------------------------------------------------------------------------------------

    def find_into(self, keys: Tensor, tables: Tensor, out: Tensor) -> Tensor:
        """Copy the rows of keys to `out`, and return the place of each, -1 where it is absent; waits for nothing.

        Args:
            keys, tables: (n,), int64 and int32, on the device.
            out: (n, row_bytes / 4), of a type of 4 bytes; rows may be further apart. Absent keys' rows stay as they
                are.

        Returns:
            (n,), int64, on the device.
        """
        from viviane.ops.row_cache.gpu_kernels import find_kernel, keys_a_program
        from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

        _check_lookup(keys, tables, out, self._words)
        count = len(keys)
        places = torch.empty(count, dtype=torch.int64, device=self.device)
        if not count:
            return places
        reader = next(self._last_reader)
        self._readers[reader] = None  # before the launch: places that it may read are kept
        try:
            with on_device(keys):
                block = keys_a_program(self._words)
                find_kernel[(ceil_div(count, block),)](
                    keys, tables, self._lines, self._records, self._memory.tensor, out.view(torch.int32), places, count,
                    len(self._own_lines), out.stride(0), _now(), words=self._words, width=power_of_two(self._words),
                    block=block, num_warps=4,
                )  # fmt: skip
        except BaseException:
            del self._readers[reader]
            raise
        if self._stream is None:
            del self._readers[reader]
        else:
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(torch.cuda.current_stream(self.device))
            self._readers[reader] = ended
            self._forget_readers()
        return places

    def find_for(
        self, request: LookupRequest, out: Tensor, columns: Sequence[int], tables: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Copy the rows of a request's keys to `out`, zeros where a key is absent or skipped, and wait for the answer.

        Args:
            request: with the keys of F features and B rows; see `LookupRequests.take`.
            out: (B, W), of a type of 4 bytes, on the device.
            columns: (F,), where the row of each feature begins.
            tables: (F,), the number of each feature's table; a number that no table has reads zeros.

        Returns:
            `request.found`, (F, B).
        """
        if not request.keys.size:
            return request.found
        reader = next(self._last_reader)
        self._readers[reader] = None  # before the launch: places that it may read are kept
        try:
            stream = self._current_stream()
            self._launch(request, out, columns, tables, _now(), stream)
            if stream is not None:
                synchronize(stream)
        finally:
            del self._readers[reader]
        return request.found

    @cached_property
    def _current_stream(self) -> Callable[[], int | None]:
        """What returns the current stream's handle."""
        from viviane.ops.triton_parts.launch import current_stream

        index = self._lines.device.index
        return (lambda: None) if self._stream is None else partial(current_stream, index)

    @cached_property
    def _launch(self) -> RequestLaunch:
        from viviane.ops.row_cache.request_launch import RequestLaunch

        index = self._lines, self._records, self._memory.tensor
        return RequestLaunch(index, self._words)

    def find(self, keys: NDArray[np.int64], out: NDArray[np.uint8], table: int = 0) -> NDArray[np.bool_]:
        """Copy rows to host memory, and return which were there; see `RowCache.find`."""
        given = torch.from_numpy(np.ascontiguousarray(keys)).to(self.device)
        tables = torch.full((len(keys),), table, dtype=torch.int32, device=self.device)
        rows = torch.empty((len(keys), self._words), dtype=torch.int32, device=self.device)
        found: NDArray[np.bool_] = (self.find_into(given, tables, rows) >= 0).cpu().numpy()
        out[found] = rows.cpu().numpy().view(np.uint8)[found]
        return found

    def _forget_readers(self) -> None:
        """Drop lookups that have ended from the front: they are in the order of their launches, nearly."""
        for reader, event in list(self._readers.items())[:4]:
            if event is not None and event.query():
                self._readers.pop(reader, None)

    # Writing ----------------------------------------------------------------------------------------------------

    def insert(
        self, keys: NDArray[np.int64], rows: NDArray[np.uint8], table: int = 0, *,
        only: Literal["all", "present", "absent"] = "all",
    ) -> int:  # fmt: skip
        """Put rows in, visible to every later lookup, and return how many keys are there; see `RowCache.insert`."""
        keys, last = np.unique(keys[::-1], return_index=True)  # of several rows of one key the last counts
        rows = np.ascontiguousarray(rows[len(rows) - 1 - last])
        with self._turn:
            places = self._places_of(keys, table)
            if only != "absent":
                for pool in (self._near, self._far):
                    own = pool.holds(places)
                    self._fill(pool, keys[own], rows[own], table)
            if only != "present":
                new = places < 0
                self._fill(self._near, keys[new], rows[new], table, makes_room=True)
            return len(self)

    def _fill(
        self, pool: _Pool, keys: NDArray[np.int64], rows: NDArray[np.uint8], table: int, *, makes_room: bool = False
    ) -> None:
        """Write rows to new places of a memory; a row that is replaced leaves one there."""
        start = 0
        while start < len(keys):
            wanted = min(len(keys) - start, pool.size - pool.capacity)
            count = self._room(wanted) if makes_room else wanted
            self._wait_for(pool, count)
            part = slice(start, start + count)
            tables = np.full(count, table, np.int32)
            self._change(np.ascontiguousarray(keys[part]), tables, self._take(pool, count), rows=rows[part])
            start += count

    def erase(self, keys: NDArray[np.int64], table: int = 0) -> int:
        """Remove keys, and return how many were there."""
        with self._turn:
            places = self._places_of(np.unique(keys), table)
            return self._remove(places[places >= 0])

    def evict_older(self, seconds: float) -> int:
        """Remove rows that were not read for that long, and return how many."""
        with self._turn:
            held = np.flatnonzero(self._at >= 0)
            removed = self._remove(held[self._uses()[held] < _now() - seconds * _TICKS])
            self.num_evicted += removed
            return removed

    def clear(self, table: int | None = None) -> None:
        """Remove all rows, or those of a table."""
        with self._turn:
            held = np.flatnonzero(self._at >= 0)
            self._remove(held if table is None else held[self._own_tables[held] == table])

    def promote(self, most: int | None = None) -> int:
        """Let rows of the host's memory that were used later than some of the GPU's change places with them.

        Returns:
            How many rows came to the GPU's memory.
        """
        with self._turn:
            near, far = self._held(self._near), self._held(self._far)
            uses = self._uses()
            near, far = near[np.argsort(uses[near], kind="stable")], far[np.argsort(-uses[far], kind="stable")]
            limit = min(len(near), len(far), max(1, self._near.size - self._near.capacity), most or len(far))
            count = int(np.count_nonzero(uses[far[:limit]] > uses[near[:limit]]))
            if count:
                self._wait_for(self._far, count)
                self._move(near[:count], self._far)
                self._wait_for(self._near, count)
                self._move(far[:count], self._near)
            return count

    # Places -----------------------------------------------------------------------------------------------------

    def _places_of(self, keys: NDArray[np.int64], table: int) -> _Places:
        from viviane.ops.row_cache.cpu_lines import locate

        tables = np.full(len(keys), table, np.int32)
        keys = np.ascontiguousarray(keys)
        found: _Places = locate(keys, tables, self._own_lines, self._own_keys, self._own_tables)
        return found

    def _held(self, pool: _Pool) -> _Places:
        return np.flatnonzero(self._at[pool.first : pool.first + pool.size] >= 0) + pool.first

    def _uses(self) -> NDArray[np.int32]:
        """Return when each place was used last; the copy waits for lookups that were launched before."""
        from viviane.ops.row_cache.gpu_kernels import USE_WORD

        found: NDArray[np.int32] = self._records[:, USE_WORD].cpu().numpy()
        return found

    def _room(self, wanted: int) -> int:
        """Make room for some of the wanted rows in the GPU's memory, and return for how many."""
        near, far = self._near, self._far
        if near.held >= near.capacity:
            count = max(1, min(wanted, near.capacity // 8, near.size - near.capacity))
            leaving = self._oldest(near, count)
            if far.size:
                if far.held + count > far.capacity:
                    self._evict(far, max(count, far.capacity // 8))
                count = min(count, far.capacity)
                self._wait_for(far, count)
                self._move(leaving[:count], far)
            else:
                self._evict(near, count)
        return min(wanted, near.capacity - near.held)

    def _oldest(self, pool: _Pool, count: int) -> _Places:
        held = self._held(pool)
        if self.eviction == "random":
            return self._random.choice(held, count, replace=False)
        return held[np.argsort(self._uses()[held], kind="stable")[:count]]

    def _evict(self, pool: _Pool, count: int) -> None:
        self.num_evicted += self._remove(self._oldest(pool, min(count, pool.held)))

    def _take(self, pool: _Pool, count: int) -> _Places:
        taken = pool.free[len(pool.free) - count :]
        del pool.free[len(pool.free) - count :]
        pool.held += count
        return np.array(taken, np.int64)

    def _wait_for(self, pool: _Pool, count: int) -> None:
        """Return when so many places are free: lookups in progress end within milliseconds."""
        while len(pool.free) < count:
            self._reclaim()
            if len(pool.free) < count:
                time.sleep(0.0001)

    def _reclaim(self) -> None:
        """Free the places that no lookup can read any more."""
        while self._retired:
            one = self._retired[0]
            if one.switched is not None and not one.switched.query():
                return
            if one.readers is None:  # later lookups see the new index
                one.readers = list(self._readers)
            for reader in one.readers:
                event = self._readers.get(reader, False)
                if event is None or (event is not False and not event.query()):
                    return
                self._readers.pop(reader, None)
            self._retired.popleft()
            for pool in (self._near, self._far):
                pool.free += one.places[pool.holds(one.places)].tolist()

    # Changes of the index ---------------------------------------------------------------------------------------

    def _change(
        self, keys: NDArray[np.int64], tables: _Tables, places: _Places, *, rows: NDArray[np.uint8] | None = None,
        sources: _Places | None = None,
    ) -> None:  # fmt: skip
        """Fill places with rows, and let the index name them."""
        from viviane.ops.row_cache.cpu_lines import RETIRED, TOUCHED, assign

        counts, retired = np.zeros(4, np.int64), np.empty(len(keys), np.int64)
        assign(
            keys, tables, places, self._own_lines, self._own_keys, self._own_tables, self._at, self._marks,
            self._touched, retired, counts,
        )  # fmt: skip
        with self._writing() as ended:
            self._write(keys, tables, places, rows, sources)
            self._switch(int(counts[TOUCHED]))
            ended.append(self._event())
        self._retire(retired[: counts[RETIRED]], ended[0])

    def _move(self, places: _Places, pool: _Pool) -> None:
        """Move rows to the other memory."""
        keys, tables = self._own_keys[places], self._own_tables[places]
        self._change(keys, tables, self._take(pool, len(places)), sources=places)

    def _remove(self, places: _Places) -> int:
        from viviane.ops.row_cache.cpu_lines import TOUCHED, remove

        if not len(places):
            return 0
        counts = np.zeros(4, np.int64)
        remove(places, self._own_lines, self._own_keys, self._own_tables, self._at, self._marks, self._touched, counts)
        with self._writing() as ended:
            self._switch(int(counts[TOUCHED]))
            ended.append(self._event())
        self._retire(places, ended[0])
        return len(places)

    def _retire(self, places: _Places, switched: Any) -> None:
        for pool in (self._near, self._far):
            pool.held -= int(np.count_nonzero(pool.holds(places)))
        if len(places):
            self._retired.append(_Retired(places.copy(), switched))
        self._reclaim()

    def _writing(self) -> _Writing:
        return _Writing(self._stream)

    def _event(self) -> Any:
        if self._stream is None:
            return None
        made = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made.record(self._stream)
        return made

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _write(
        self, keys: NDArray[np.int64], tables: _Tables, places: _Places, rows: NDArray[np.uint8] | None,
        sources: _Places | None,
    ) -> None:  # fmt: skip
        from viviane.ops.row_cache.gpu_kernels import write_kernel
        from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

        given = None if rows is None else self._to_device(rows.view(np.int32))
        moved = None if sources is None else self._to_device(sources)
        with on_device(self._lines):
            write_kernel[(ceil_div(len(keys), _BLOCK),)](
                self._to_device(keys), self._to_device(tables), given, moved, self._to_device(places), self._records,
                self._memory.tensor, len(keys), _now(), words=self._words, width=power_of_two(self._words),
                block=_BLOCK, num_warps=4,
            )  # fmt: skip

    def _switch(self, touched: int) -> None:
        from viviane.ops.row_cache.gpu_kernels import switch_kernel
        from viviane.ops.triton_parts.launch import ceil_div, on_device

        lines = self._touched[:touched]
        self._marks[lines] = 0
        if touched:
            with on_device(self._lines):
                switch_kernel[(ceil_div(touched * 8, 128),)](
                    self._to_device(lines), self._to_device(self._own_lines[lines]), self._lines, touched, block=128,
                    num_warps=4,
                )  # fmt: skip

    # All of it --------------------------------------------------------------------------------------------------

    def keys(self, table: int = 0) -> NDArray[np.int64]:
        """Return the keys of a table that are there, those used last first."""
        with self._turn:
            held = np.flatnonzero((self._at >= 0) & (self._own_tables == table))
            found: NDArray[np.int64] = self._own_keys[held[np.argsort(-self._uses()[held], kind="stable")]]
            return found

    def scan(self, batch_rows: int, table: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield keys and rows of a table, each key that is there once."""
        keys = self.keys(table)
        for start in range(0, len(keys), batch_rows):
            part = keys[start : start + batch_rows]
            rows = np.empty((len(part), self.row_bytes), np.uint8)
            found = self.find(part, rows, table)
            yield part[found], rows[found]


class _Writing:
    """Work of the writer on its own stream; what was written is there when the block is left."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._context: Any = None

    def __enter__(self) -> list[Any]:
        if self._stream is not None:
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()
        return []

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._context.__exit__(*error)
            self._stream.synchronize()


def _now() -> int:
    return int(time.monotonic() * _TICKS)


def _pool(first: int, capacity: int) -> _Pool:
    size = capacity + max(_LEAST_SPARE, capacity // 50) if capacity else 0
    return _Pool(first, capacity, size, list(range(first + size - 1, first - 1, -1)))


def _check(capacity: int, row_bytes: int, device: torch.device, host_capacity: int) -> None:
    if capacity < 1 or host_capacity < 0 or row_bytes < 4 or row_bytes % 4:
        value = f"capacity {capacity}, host_capacity {host_capacity}, row_bytes {row_bytes}"
        raise ConfigError("a cache cannot be made so", value=value, allowed="1 or more, 0 or more, multiples of 4")
    if capacity + host_capacity >= _TABLE_LIMIT:
        raise ConfigError("a cache has too many rows", value=capacity + host_capacity, allowed=f"{_TABLE_LIMIT:,}")
    if device.type != "cuda" and not _is_interpreted():
        raise ConfigError("this cache lies on a GPU", value=str(device), allowed="cuda",
                          fix="leave `place` at \"host\"")  # fmt: skip


def _is_interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _check_lookup(keys: Tensor, tables: Tensor, out: Tensor, words: int) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1 or not keys.is_contiguous():
        raise ConfigError("keys have another form", value=f"{keys.dtype} {tuple(keys.shape)}", allowed="int64 (n,)")
    if tables.dtype != torch.int32 or tables.shape != keys.shape or not tables.is_contiguous():
        value = f"{tables.dtype} {tuple(tables.shape)}"
        raise ConfigError("table numbers have another form", value=value, allowed=f"int32 {tuple(keys.shape)}")
    if out.element_size() != 4 or out.shape != (len(keys), words) or (words > 1 and out.stride(1) != 1):
        value = f"{out.dtype} {tuple(out.shape)}"
        raise ConfigError("rows have another form", value=value, allowed=f"4-byte numbers {(len(keys), words)}")
