"""The plain truth of an index of keys: a dict."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.ops.hash_table.index import CLOCK_BITS, Inserted, KeyIndex, Order, check_content, check_keys
from viviane.ops.hash_table.marks import Marks
from viviane.ops.hash_table.reserve import reserved

__all__ = ["Index", "Marks", "distinct", "initial_rows", "mix64"]

_GOLDEN = 0x9E3779B97F4A7C15
_LOW = (1 << 64) - 1
_MOST_USES = (1 << CLOCK_BITS) - 1


class Index(KeyIndex):
    """Rows by key in a dict, freed rows in a list; the key that goes first is looked for among all."""

    def __init__(
        self,
        max_rows: int,
        order: Order,
        with_uses: bool,
        initial_rows: int = 1,
        segment_lines: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.order = order
        self.device = device or torch.device("cpu")
        self.keys = self._numbers()
        self.stamps = self._numbers()
        self.uses = self._numbers() if with_uses else None
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._num_rows = 0
        self._evicted = 0

    def _numbers(self) -> Tensor:
        if self.device.type == "cpu":
            return reserved(self.max_rows, torch.int64)
        return torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_rows(self) -> int:
        """Rows allocated so far."""
        return self._num_rows

    @property
    def num_slots(self) -> int:
        """Places for keys."""
        return self.max_rows

    @property
    def num_evicted(self) -> int:
        """Keys that were evicted for others so far."""
        return self._evicted

    def find(self, keys: Tensor, otherwise: int = -1) -> Tensor:
        """Return the rows of keys, or another number."""
        check_keys(keys, self.device)
        found = [self._rows.get(key, otherwise) for key in keys.tolist()]
        return torch.tensor(found, dtype=torch.int64, device=keys.device)

    def touch(self, keys: Tensor, stamp: int, scores: Tensor | None = None) -> Tensor:
        """Find keys and note their use."""
        rows = self.find(keys)
        for n, row in enumerate(rows.tolist()):
            if row >= 0:
                self._use(row, stamp, n, scores)
        return rows

    def _use(self, row: int, stamp: int, n: int, scores: Tensor | None) -> None:
        self.stamps[row] = stamp
        if self.uses is not None:
            self.uses[row] = self.uses[row] + 1 if scores is None else scores[n]

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
        new: list[tuple[int, int]] = []
        for n in entries.tolist():
            key = int(keys[n])
            row = self._rows.get(key, -1)
            if row < 0:
                row = self._take_row(stamp if guard is None else guard)
                if row < 0:
                    break
                new.append((row, n))
                self._rows[key] = row
                self.keys[row] = key
                if self.uses is not None:
                    self.uses[row] = 0
            self._use(row, stamp, n, scores)
            rows[n] = row
        else:
            return _inserted(new, self.device, complete=True)
        return _inserted(new, self.device, complete=False)

    def _take_row(self, guard: int) -> int:
        if self._free:
            return self._free.pop()
        if self._num_rows < self.max_rows:
            self._num_rows += 1
            return self._num_rows - 1
        allowed = [row for row in self._rows.values() if int(self.stamps[row]) < guard]
        if self.order == "none" or not allowed:
            return -1
        row = min(allowed, key=lambda row: (self._score(row), row))
        del self._rows[int(self.keys[row])]
        self._evicted += 1
        return row

    def _score(self, row: int) -> int:
        stamp = int(self.stamps[row])
        if self.order == "stamp" or self.uses is None:
            return stamp
        uses = int(self.uses[row])
        return uses if self.order == "uses" else (stamp >> CLOCK_BITS << CLOCK_BITS) + min(uses, _MOST_USES)

    def erase(self, keys: Tensor) -> int:
        """Take keys out and free their rows."""
        before = len(self._rows)
        for key in keys.tolist():
            row = self._rows.pop(key, -1)
            if row >= 0:
                self.stamps[row] = -1
                self._free.append(row)
        return before - len(self._rows)

    def clear(self) -> None:
        """Take all keys out."""
        self._rows.clear()
        self._free.clear()
        self._num_rows = 0

    def free_rows(self) -> Tensor:
        """Return the freed rows."""
        return torch.tensor(self._free, dtype=torch.int64, device=self.device)

    def restore(self, keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor) -> None:
        """Replace everything."""
        check_content(keys, rows, stamps, uses, free, self.max_rows)
        self.clear()
        self._rows = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        self._free = free.tolist()
        self._num_rows = len(self._rows) + len(self._free)
        self.keys[rows] = keys
        self.stamps[rows] = stamps
        self.stamps[free] = -1
        if self.uses is not None and uses is not None:
            self.uses[rows] = uses


def _inserted(new: list[tuple[int, int]], device: torch.device, *, complete: bool) -> Inserted:
    pairs = torch.tensor(new, dtype=torch.int64, device=device).view(-1, 2)
    return Inserted(pairs[:, 0].contiguous(), pairs[:, 1].contiguous(), complete)


def distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of their first place, each key's place among them, and counts."""
    places: dict[int, int] = {}
    found = [places.setdefault(key, len(places)) for key in keys.tolist()]
    inverse, unique = (torch.tensor(part, dtype=torch.int64, device=keys.device) for part in (found, list(places)))
    return unique, inverse, torch.bincount(inverse, minlength=len(places))


def mix64(x: int) -> int:
    """Mix 64 bits by the finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LOW
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LOW
    return x ^ (x >> 31)


def initial_rows(weight: Tensor, rows: Tensor, keys: Tensor, kind: str, a: float, b: float, seed: int) -> None:
    """Give rows values that depend on seed, key and column alone."""
    if kind == "constant":
        weight[rows] = torch.tensor(a, dtype=torch.float32).to(weight.dtype)
        return
    a, b = torch.tensor([a, b - a if kind == "uniform" else b], dtype=torch.float32).tolist()
    for row, key in zip(rows.tolist(), keys.tolist(), strict=True):
        start = mix64((key + seed * _GOLDEN) & _LOW)
        bits = [mix64((start + (column + 1) * _GOLDEN) & _LOW) for column in range(weight.shape[1])]
        if kind == "uniform":
            drawn = torch.tensor([x >> 40 for x in bits], dtype=torch.float64) / 2**24
        else:
            first = torch.tensor([x >> 32 for x in bits], dtype=torch.float64)
            second = torch.tensor([x & 0xFFFFFFFF for x in bits], dtype=torch.float64)
            drawn = (-2 * ((first + 0.5) / 2**32).log()).sqrt() * (2 * torch.pi * second / 2**32).cos()
        weight[row] = (a + b * drawn).to(torch.float32).to(weight.dtype)
