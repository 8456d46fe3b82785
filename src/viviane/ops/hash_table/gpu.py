"""The index of keys on a GPU: lines of four slots, claimed by atomic swaps of rows that were given out beforehand.

Distinct keys are numbered first, in order of their entries, and get their rows in that order; only then do all of them
look for a slot at once. Which slot a key wins depends on the race, its row does not: results are those of
`viviane.ops.hash_table.reference`, number by number.

A line is 32 bytes of keys, (L, 4) int64, and 32 bytes of its state, (L, 8) int32: four rows + 1 (0: empty), how many
keys passed the line because it was full, three unused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.hash_table.gpu_kernels import BLOCK, LAWS, draw_kernel, erase_kernel, find_kernel, insert_kernel
from viviane.ops.hash_table.index import CLOCK_BITS, Inserted, KeyIndex, Order, check_keys
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_LINE_SLOTS = 4
_STATE = 8
_MOST_USES = (1 << CLOCK_BITS) - 1


class Index(KeyIndex):
    """Slots on the GPU, at most half full; their number doubles in one pass over them."""

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
        self._evicted = 0
        self.keys = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.stamps = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.uses = torch.zeros(max_rows, dtype=torch.int64, device=device) if with_uses else None
        self.clear()

    def clear(self) -> None:
        """Take all keys out."""
        self._count = self._num_rows = 0
        self._free = torch.empty(0, dtype=torch.int64, device=self.device)
        self._allocate(power_of_two(max(2 * self._initial_rows // _LINE_SLOTS, 64)))

    def _allocate(self, lines: int) -> None:
        self._lines = lines
        self._slots = torch.zeros(lines, _LINE_SLOTS, dtype=torch.int64, device=self.device)
        self._state = torch.zeros(lines, _STATE, dtype=torch.int32, device=self.device)

    def __len__(self) -> int:
        return self._count

    @property
    def num_rows(self) -> int:
        """Rows handed out so far."""
        return self._num_rows

    @property
    def num_slots(self) -> int:
        """Places for keys."""
        return self._lines * _LINE_SLOTS

    @property
    def num_evicted(self) -> int:
        """Keys that made room for others so far."""
        return self._evicted

    def find(self, keys: Tensor) -> Tensor:
        """Return the rows of keys, or -1."""
        check_keys(keys, self.device)
        rows = torch.empty(len(keys), dtype=torch.int64, device=self.device)
        if len(keys):
            with on_device(keys):
                find_kernel[(ceil_div(len(keys), BLOCK),)](
                    keys.contiguous(), self._slots, self._state, rows, len(keys), self._lines, block=BLOCK
                )
        return rows

    def touch(self, keys: Tensor, stamp: int, scores: Tensor | None = None) -> Tensor:
        """Find keys and note their use."""
        rows = self.find(keys)
        there = (rows >= 0).nonzero().squeeze(1)
        self._note(rows[there], stamp, None if scores is None else self._own_scores(scores)[there])
        return rows

    def _note(self, rows: Tensor, stamp: int, scores: Tensor | None) -> None:
        self.stamps[rows] = stamp
        if self.uses is None:
            return
        if scores is None:
            self.uses.index_add_(0, rows, torch.ones_like(rows))
            return
        own, places, _ = distinct(rows)
        self.uses[own] = scores[_last_entries(places, len(own))]

    def _own_scores(self, scores: Tensor) -> Tensor:
        if self.uses is None:
            raise VivianeError("this index keeps no scores", fix="make it with with_uses=True")
        return scores.to(torch.int64)

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
        own_scores = None if scores is None else self._own_scores(scores)
        unique, places, _ = distinct(keys[entries])
        first = _first_entries(places, len(unique))
        unique_rows = self.find(unique)
        there = unique_rows[unique_rows >= 0]
        self.stamps[there] = stamp
        absent = (unique_rows < 0).nonzero().squeeze(1)
        new_rows = self._take_rows(len(absent), stamp if guard is None else guard)
        complete = len(new_rows) == len(absent)
        done = len(entries) if complete else int(first[absent[len(new_rows)]])
        absent = absent[: len(new_rows)]
        self._put(unique[absent], new_rows)
        unique_rows[absent] = new_rows
        self.keys[new_rows] = unique[absent]
        if self.uses is not None:
            self.uses[new_rows] = 0
        filled, found = entries[:done], unique_rows[places[:done]]
        rows[filled] = found
        self._note(found, stamp, None if own_scores is None else own_scores[filled])
        return Inserted(new_rows, entries[first[absent]], complete)

    def _take_rows(self, count: int, guard: int) -> Tensor:
        """Return rows for new keys: freed ones, ones never used, those of the keys that go first."""
        freed = self._free.flip(0)[:count]
        self._free = self._free[: len(self._free) - len(freed)]
        fresh = min(count - len(freed), self.max_rows - self._num_rows)
        unused = torch.arange(self._num_rows, self._num_rows + fresh, device=self.device)
        self._num_rows += fresh
        missing = count - len(freed) - fresh
        if not missing or self.order == "none":
            return torch.cat([freed, unused])
        victims = self._first_to_go(missing, guard, torch.cat([freed, unused]))
        self._remove(self.keys[victims], victims)
        self._evicted += len(victims)
        return torch.cat([freed, unused, victims])

    def _first_to_go(self, count: int, guard: int, taken: Tensor) -> Tensor:
        allowed = (self.stamps >= 0) & (self.stamps < guard)
        allowed[taken] = False
        candidates = allowed.nonzero().squeeze(1)
        score = self.stamps[candidates]
        if self.order != "stamp":
            assert self.uses is not None
            uses = self.uses[candidates]
            score = uses if self.order == "uses" else (score & ~_MOST_USES) + uses.clamp_max(_MOST_USES)
        return candidates[score.sort(stable=True).indices[:count]]

    def _put(self, keys: Tensor, rows: Tensor) -> None:
        if 2 * (self._count + len(keys)) > self.num_slots:
            lines = power_of_two(2 * (self._count + len(keys)) // _LINE_SLOTS + 1)
            stored, owners = self._stored()
            self._allocate(lines)
            self._claim(stored, owners)
        self._claim(keys, rows)
        self._count += len(keys)

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Return the keys in slots and their rows."""
        rows = self._state[:, :_LINE_SLOTS]
        used = rows != 0
        return self._slots[used], rows[used].to(torch.int64) - 1

    def _claim(self, keys: Tensor, rows: Tensor) -> None:
        if len(keys):
            with on_device(keys):
                insert_kernel[(ceil_div(len(keys), BLOCK),)](
                    keys, rows, self._slots, self._state, len(keys), self._lines, block=BLOCK
                )

    def _remove(self, keys: Tensor, rows: Tensor) -> None:
        """Take distinct keys out that are there."""
        if len(keys):
            with on_device(keys):
                erase_kernel[(ceil_div(len(keys), BLOCK),)](
                    keys, self._slots, self._state, len(keys), self._lines, block=BLOCK
                )
        self.stamps[rows] = -1
        self._count -= len(keys)

    def erase(self, keys: Tensor) -> int:
        """Take keys out and free their rows."""
        unique = distinct(keys)[0]
        rows = self.find(unique)
        there = (rows >= 0).nonzero().squeeze(1)
        self._remove(unique[there], rows[there])
        self._free = torch.cat([self._free, rows[there]])
        return len(there)

    def free_rows(self) -> Tensor:
        """Return the freed rows."""
        return self._free.clone()

    def restore(self, keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor) -> None:
        """Replace everything."""
        self.clear()
        keys, rows, free = (part.to(self.device, torch.int64).contiguous() for part in (keys, rows, free))
        self._num_rows = len(rows) + len(free)
        self._free = free.clone()
        self.keys[rows] = keys
        self.stamps[rows] = stamps.to(self.device)
        self.stamps[free] = -1
        if self.uses is not None and uses is not None:
            self.uses[rows] = uses.to(self.device)
        self._put(keys, rows)


def _first_entries(places: Tensor, count: int) -> Tensor:
    """Return the first entry of each of `count` places."""
    entries = torch.arange(len(places), device=places.device)
    return torch.full((count,), len(places), device=places.device).scatter_reduce_(0, places, entries, "amin")


def _last_entries(places: Tensor, count: int) -> Tensor:
    """Return the last entry of each of `count` places."""
    entries = torch.arange(len(places), device=places.device)
    return torch.zeros(count, dtype=torch.int64, device=places.device).scatter_reduce_(0, places, entries, "amax")


def distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of their first place, each key's place among them, and counts."""
    unique, places, counts = torch.unique(keys.to(torch.int64), return_inverse=True, return_counts=True)
    order = _first_entries(places, len(unique)).argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=keys.device)
    return unique[order], rank[places], counts[order]


def initial_rows(weight: Tensor, rows: Tensor, keys: Tensor, kind: str, a: float, b: float, seed: int) -> None:
    """Give rows values that depend on seed, key and column alone."""
    if not len(rows):
        return
    dim = weight.shape[1]
    numbers = torch.tensor([a, b - a if kind == "uniform" else b], dtype=torch.float32).tolist()
    signed = seed - 2**64 if seed >= 2**63 else seed
    law = torch.tensor([signed], device=weight.device)
    with on_device(weight):
        draw_kernel[(ceil_div(len(rows) * dim, BLOCK),)](
            weight, rows.contiguous(), keys.to(torch.int64).contiguous(), law,
            torch.tensor(numbers, dtype=torch.float64, device=weight.device), len(rows) * dim, dim,
            kind=LAWS[kind], block=BLOCK,
        )  # fmt: skip
