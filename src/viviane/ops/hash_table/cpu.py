"""The index of keys on the CPU: open addressing that grows by segments, all of it in memory that never moves."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.hash_table.cpu_kernels import (
    COMPLETE,
    CROWDED,
    erase_kernel,
    find_kernel,
    insert_kernel,
    restore_kernel,
    score_kernel,
)
from viviane.ops.hash_table.cpu_order import ORDERS
from viviane.ops.hash_table.cpu_slots import (
    ASIDE,
    BASE,
    FIRST_FREE,
    HEAD_SIZE,
    HEAP,
    KEYS,
    LINE_BYTES,
    LINE_SLOTS,
    MAX_ROWS,
    MAX_SEGMENTS,
    NUM_EVICTED,
    NUM_FREE,
    NUM_KEYS,
    NUM_ROWS,
    ORDER,
    PLACES,
    SEGMENT_BITS,
    SEGMENT_KEYS,
    SEGMENT_LINES,
    SLOTS,
    SPARE,
    SPLIT,
    STAMPS,
    USES,
)
from viviane.ops.hash_table.cpu_values import LAWS, UNIFORM, distinct_kernel, initial_kernel
from viviane.ops.hash_table.index import Inserted, KeyIndex, Order, check_content, check_keys
from viviane.ops.hash_table.marks import Marks
from viviane.ops.hash_table.reserve import reserved
from viviane.ops.native.kernels import num_threads, sources
from viviane.ops.native.numbers import KINDS
from viviane.ops.native.pages import empty

__all__ = ["Index", "Marks", "distinct", "initial_rows"]

_BLOCKS_PER_THREAD = 4


class Index(KeyIndex):
    """Slots, rows and heap in reserved memory; the head records where each begins and how much of it is used."""

    def __init__(
        self,
        max_rows: int,
        order: Order,
        with_uses: bool,
        initial_rows: int,
        segment_lines: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.order = order
        self.device = device
        self._initial_rows = initial_rows
        self._uses = with_uses
        self._head = torch.zeros(HEAD_SIZE, dtype=torch.int64)
        self._head[SEGMENT_LINES] = segment_lines
        self.clear()

    def clear(self) -> None:
        """Take all keys out, and give their memory back."""
        lines, heap = int(self._head[SEGMENT_LINES]), self.order != "none"
        base = 1
        while base * lines * 12 < self._initial_rows * 5:  # see `cpu_slots.wants_split`
            base *= 2
        # Lines have 8/5 keys or more in the mean when the last segment comes; the rest is for uneven ones.
        max_segments = max(2 * base, 4 * self.max_rows // lines) + 64
        evicted = int(self._head[NUM_EVICTED])
        counts = {
            SLOTS: LINE_BYTES // 8 * lines * max_segments, SEGMENT_KEYS: max_segments, SPARE: 2 * LINE_SLOTS * lines,
            KEYS: self.max_rows, STAMPS: self.max_rows, USES: self.max_rows * self._uses,
            HEAP: 2 * self.max_rows * heap, PLACES: self.max_rows * heap, ASIDE: self.max_rows * heap,
        }  # fmt: skip
        self._memory = {name: reserved(count, torch.int64) for name, count in counts.items() if count}
        self._head[:] = 0
        for name, value in {
            FIRST_FREE: -1, BASE: base, SEGMENT_LINES: lines, SEGMENT_BITS: lines.bit_length() - 1,
            MAX_SEGMENTS: max_segments, MAX_ROWS: self.max_rows, ORDER: ORDERS[self.order], NUM_EVICTED: evicted,
        }.items():  # fmt: skip
            self._head[name] = value
        for name, vector in self._memory.items():
            self._head[name] = vector.data_ptr()
        self.keys, self.stamps = self._memory[KEYS], self._memory[STAMPS]
        self.uses = self._memory.get(USES)

    def __len__(self) -> int:
        return int(self._head[NUM_KEYS])

    @property
    def num_rows(self) -> int:
        """Rows allocated so far."""
        return int(self._head[NUM_ROWS])

    @property
    def num_slots(self) -> int:
        """Places for keys."""
        return int((self._head[BASE] + self._head[SPLIT]) * self._head[SEGMENT_LINES]) * LINE_SLOTS

    @property
    def num_evicted(self) -> int:
        """Keys that were evicted for others so far."""
        return int(self._head[NUM_EVICTED])

    def find(self, keys: Tensor, otherwise: int = -1) -> Tensor:
        """Return the rows of keys, or another number."""
        rows = self._find(keys, 0, touches=False, counts=False)
        return rows if otherwise == -1 else rows.masked_fill_(rows < 0, otherwise)

    def touch(self, keys: Tensor, stamp: int, scores: Tensor | None = None) -> Tensor:
        """Find keys and note their use."""
        if scores is None:
            return self._find(keys, stamp, touches=True, counts=self._uses)
        rows = self.find(keys)
        own = self._own_scores(scores)
        score_kernel(sources())(
            (self._head.data_ptr(), rows.data_ptr(), own.data_ptr(), len(rows), stamp), tickets=1, threads=1
        )
        return rows

    def _find(self, keys: Tensor, stamp: int, *, touches: bool, counts: bool) -> Tensor:
        check_keys(keys, self.device)
        keys = keys.contiguous()
        rows = empty(len(keys), torch.int64)
        threads = num_threads(len(keys))
        find_kernel(keys.element_size(), touches, counts, sources())(
            (self._head.data_ptr(), keys.data_ptr(), rows.data_ptr(), len(keys), stamp),
            tickets=threads * (_BLOCKS_PER_THREAD if threads > 1 else 1), threads=threads,
        )  # fmt: skip
        return rows

    def insert(
        self,
        keys: Tensor,
        rows: Tensor,
        entries: Tensor,
        stamp: int,
        *,
        guard: int | None = None,
        scores: Tensor | None = None,
    ) -> Inserted:
        """Give the keys of some entries rows."""
        check_keys(keys, self.device)
        if rows.shape != keys.shape or rows.dtype != torch.int64 or entries.dtype != torch.int64:
            raise VivianeError("rows and entries are int64, one row for each key", value=tuple(rows.shape))
        keys, entries = keys.contiguous(), entries.contiguous()
        own = None if scores is None else self._own_scores(scores)
        new = torch.empty(2, len(entries), dtype=torch.int64)
        result = torch.zeros(2, dtype=torch.int64)
        insert_kernel(keys.element_size(), sources())(
            (self._head.data_ptr(), keys.data_ptr(), rows.data_ptr(), entries.data_ptr(), len(entries), stamp,
             stamp if guard is None else guard, 0 if own is None else own.data_ptr(), new[0].data_ptr(),
             new[1].data_ptr(), result.data_ptr()),
            tickets=1, threads=1,
        )  # fmt: skip
        count, status = result.tolist()
        return Inserted(new[0, :count], new[1, :count], status == COMPLETE)

    def _own_scores(self, scores: Tensor) -> Tensor:
        if not self._uses:
            raise VivianeError("this index keeps no scores", fix="make it with with_uses=True")
        return scores.to(torch.int64).contiguous()

    def erase(self, keys: Tensor) -> int:
        """Take keys out and free their rows."""
        check_keys(keys, self.device)
        keys, before = keys.contiguous(), len(self)
        erase_kernel(keys.element_size(), sources())(
            (self._head.data_ptr(), keys.data_ptr(), len(keys)), tickets=1, threads=1
        )
        return before - len(self)

    def free_rows(self) -> Tensor:
        """Return the freed rows."""
        free = torch.empty(int(self._head[NUM_FREE]), dtype=torch.int64)
        row = int(self._head[FIRST_FREE])
        for i in range(len(free) - 1, -1, -1):
            free[i] = row
            row = int(self.keys[row])
        return free

    def restore(self, keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor) -> None:
        """Replace everything."""
        check_content(keys, rows, stamps, uses, free, self.max_rows)
        self.clear()
        keys, rows, free = (part.to(torch.int64).contiguous() for part in (keys, rows, free))
        self._head[NUM_ROWS] = len(rows) + len(free)
        self.stamps[rows] = stamps
        if self.uses is not None and uses is not None:
            self.uses[rows] = uses
        result = torch.zeros(1, dtype=torch.int64)
        restore_kernel(sources())(
            (self._head.data_ptr(), keys.data_ptr(), rows.data_ptr(), len(keys), free.data_ptr(), len(free),
             result.data_ptr()),
            tickets=1, threads=1,
        )  # fmt: skip
        if int(result) == CROWDED:
            raise _crowded()


def _crowded() -> VivianeError:
    return VivianeError(
        "the keys fall on too few segments of the hash table",
        fix="use ids that were not chosen by their hash, or a table with a larger max_capacity",
    )


def distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of their first place, each key's place among them, and counts."""
    keys, count = keys.contiguous(), len(keys)
    if count >= 2**30:
        raise VivianeError("too many keys for one call", value=count, allowed="less than 2^30")
    size = 1 << max(4, (2 * count - 1).bit_length())
    table = torch.zeros(size, dtype=torch.int32)
    unique, inverse, counts = (empty(count, torch.int64) for _ in range(3))
    result = torch.zeros(1, dtype=torch.int64)
    distinct_kernel(keys.element_size(), sources())(
        (keys.data_ptr(), count, table.data_ptr(), size - 1, unique.data_ptr(), inverse.data_ptr(),
         counts.data_ptr(), result.data_ptr()),
        tickets=1, threads=1,
    )  # fmt: skip
    found = int(result)
    return unique[:found].clone(), inverse, counts[:found].clone()


def initial_rows(weight: Tensor, rows: Tensor, keys: Tensor, kind: str, a: float, b: float, seed: int) -> None:
    """Give rows values that depend on seed, key and column alone."""
    dim, law = weight.shape[1], LAWS[kind]
    rows, keys = rows.contiguous(), keys.to(torch.int64).contiguous()
    rounded = torch.tensor([a, b - a if law == UNIFORM else b], dtype=torch.float32).tolist()
    numbers = (ctypes.c_double * 2)(*rounded)
    threads = num_threads(len(rows) * dim)
    initial_kernel(KINDS[weight.dtype], law, sources())(
        (weight.data_ptr(), dim, rows.data_ptr(), keys.data_ptr(), len(rows), ctypes.c_int64(seed).value,
         ctypes.addressof(numbers)),
        tickets=threads * _BLOCKS_PER_THREAD, threads=threads,
    )  # fmt: skip
