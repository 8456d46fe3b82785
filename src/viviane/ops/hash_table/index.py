"""The contract of an index of keys: what every implementation does, call by call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from viviane.core.errors import VivianeError

Order = Literal["none", "stamp", "uses", "epoch_uses"]
CLOCK_BITS = 32


class TableFullError(VivianeError):
    """A table has no row left for a new key."""


def stamp_of(epoch: int, clock: int) -> int:
    """Return epoch * 2^32 + clock: later uses have larger stamps.

    Example:
        >>> stamp_of(1, 0) > stamp_of(0, 12_345)
        True
    """
    if not (0 <= epoch < 2**31 and 0 <= clock < 2**CLOCK_BITS):
        raise VivianeError("epoch or clock out of range", value=(epoch, clock), allowed="below 2^31 and 2^32")
    return epoch << CLOCK_BITS | clock


def check_keys(keys: Tensor, device: torch.device) -> None:
    """Refuse what is not a vector of whole numbers on a device."""
    if not isinstance(keys, Tensor) or keys.is_nested or keys.layout is not torch.strided:
        raise VivianeError("keys must be a vector of whole numbers beside the table", value=type(keys).__name__,
                           allowed="a dense tensor of int32 or int64")  # fmt: skip
    if keys.dim() != 1 or keys.dtype not in (torch.int32, torch.int64) or keys.device.type != device.type:
        raise VivianeError(
            "keys must be a vector of whole numbers beside the table",
            value=f"{tuple(keys.shape)} of {keys.dtype} on {keys.device.type}",
            allowed=f"int32 or int64 on {device.type}",
        )


def content_problem(
    keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor, max_rows: int
) -> str | None:
    """Return the reason why an index cannot be restored from these, see `KeyIndex.restore`; None where it can.

    Example:
        >>> zero = torch.tensor([0])
        >>> content_problem(torch.tensor([7]), torch.tensor([1]), zero, None, torch.tensor([1]), 10)
        'rows and free rows are not the numbers from 0 to 1, each once'
    """
    for name, part in {"keys": keys, "rows": rows, "stamps": stamps, "uses": uses, "free": free}.items():
        if part is not None and (part.dim() != 1 or part.dtype != torch.int64):
            return f"{name} are {tuple(part.shape)} of {part.dtype}, not a vector of int64"
        if part is not None and name != "free" and len(part) != len(keys):
            return f"{name} are {len(part)}, for {len(keys)} keys"
    count = len(rows) + len(free)
    own = torch.cat([rows, free.to(rows.device)]).sort()[0]
    problem = None
    if count > max_rows:
        problem = f"{count} rows do not fit into {max_rows}"
    elif not torch.equal(own, torch.arange(count, device=own.device)):
        problem = f"rows and free rows are not the numbers from 0 to {max(count - 1, 0)}, each once"
    elif len(torch.unique(keys)) != len(keys):
        problem = "a key occurs twice"
    elif len(stamps) and int(stamps.min()) < 0:
        problem = f"a key was used at {int(stamps.min())}, before the first use"
    return problem


def check_content(keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor, max_rows: int) -> None:
    """Refuse what `content_problem` finds."""
    problem = content_problem(keys, rows, stamps, uses, free, max_rows)
    if problem is not None:
        raise VivianeError("an index cannot be restored from this", value=problem)


@dataclass(frozen=True)
class Inserted:
    """What a call of `KeyIndex.insert` added.

    Args:
        rows: (U,), int64: rows that new keys got, in order of the keys' first entries.
        entries: (U,), int64: the first entry of each new key.
        complete: False where some key found no room; the keys before it were inserted.
    """

    rows: Tensor
    entries: Tensor
    complete: bool


@dataclass(frozen=True)
class Added:
    """What a call of `KeyIndex.find_or_insert` added, on the device, which the host does not wait for.

    Args:
        rows: (N,), int64: of new keys, in order of their first entries; the first U count, until the next call.
        entries: (N,), int64: the first entry of each new key; the first U count, until the next call.
        count: (1,), int64: U.
        given: U where the host knows it, else None.
        wanted: how many new keys the call had, where the host knows it; None: all of them got rows.
    """

    rows: Tensor
    entries: Tensor
    count: Tensor
    given: int | None
    wanted: int | None


class KeyIndex(ABC):
    """Rows of keys, with the time and number of their uses.

    Every int64 is a key like any other. A key gets the row that was freed last, else the first one never used, else
    the row of the key that goes first by `order`:

        "none"         no key is evicted
        "stamp"        the smallest stamp: least recently used
        "uses"         the smallest number of uses, or the smallest score of the caller
        "epoch_uses"   the earliest epoch of last use, then the smallest number of uses

    and among equals the smallest row. The same calls give the same rows, for any number of threads. Keys that are not a
    vector of int32 or int64 raise VivianeError.

    Args:
        keys: (max_rows,), int64: the key of each row in use.
        stamps: (max_rows,), int64: when it was used last; -1 marks a row that is free.
        uses: (max_rows,), int64: how often, or the caller's score; None where nothing asks for it.
    """

    fused: bool = False
    """Whether `find_or_insert` is there, and `gather` is the fast way to vectors."""
    max_rows: int
    order: Order
    keys: Tensor
    stamps: Tensor
    uses: Tensor | None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of keys."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows allocated so far; all rows in use lie below."""

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Places for keys."""

    @property
    @abstractmethod
    def num_evicted(self) -> int:
        """Keys that were evicted for others so far."""

    @abstractmethod
    def find(self, keys: Tensor, otherwise: int = -1) -> Tensor:
        """Return the rows of keys (N,), int64; `otherwise`, -1 or above all rows, where a key is absent."""

    @abstractmethod
    def touch(self, keys: Tensor, stamp: int, scores: Tensor | None = None) -> Tensor:
        """Find keys and note their use: stamp each row, and add one to its uses for each entry.

        Args:
            keys: (N,).
            stamp: not below any given before.
            scores: (N,), int64: take the place of the number of uses; the last entry of a key counts.
        """

    @abstractmethod
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
        """Give the keys of some entries rows; entries of one key get one row.

        Args:
            keys: (N,).
            rows: (N,), int64, as `find` or `touch` gave them; the given entries are filled in.
            entries: (M,), int64, rising: which keys to insert; a key that is there already is found.
            stamp: of the new keys; see `touch`.
            guard: rows with this stamp or a later one keep their keys; None: this call's alone.
            scores: (N,), see `touch`.
        """

    @abstractmethod
    def erase(self, keys: Tensor) -> int:
        """Take keys out, free their rows, and return how many there were. Absent keys are passed over."""

    @abstractmethod
    def clear(self) -> None:
        """Take all keys out."""

    @abstractmethod
    def free_rows(self) -> Tensor:
        """Return the freed rows, (F,), int64; the last one is reused first."""

    @abstractmethod
    def restore(self, keys: Tensor, rows: Tensor, stamps: Tensor, uses: Tensor | None, free: Tensor) -> None:
        """Replace everything by keys in given rows, (K,) each, and the freed rows below the largest of them, (F,)."""

    def find_or_insert(
        self,
        keys: Tensor,
        stamp: int,
        *,
        guard: int | None = None,
        allowed: Tensor | None = None,
        partial: bool = True,
        narrow: bool = False,
        last: bool = False,
    ) -> tuple[Tensor, Added]:
        """Do what `touch` and `insert` do in one go; only where `fused`.

        Args:
            keys: (N,).
            stamp, guard: see `touch` and `insert`.
            allowed: (N,), bool: entries whose keys may be added; None: all.
            partial: where rows are short, evict keys by the order and insert what has room; False: insert nothing.
            narrow: give rows as int32.
            last: note the last entry of each key, for `write_last`.

        Returns:
            rows of the keys, (N,), -1 where absent and not added; what was added.
        """
        raise VivianeError("this index inserts by touch and insert", fix="ask for `fused` first")

    def write_last(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Give the rows of the last `find_or_insert`, (N,), the values of their last entries, (N, D)."""
        raise VivianeError("this index inserts by touch and insert", fix="ask for `fused` first")

    @property
    def most_rows(self) -> int:
        """An upper bound of the rows allocated so far; the exact number may have to be waited for."""
        return self.num_rows

    def gather(self, keys: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys' rows of a table, (N, D), zeros where absent, and which are there, (N,)."""
        rows = self.find(keys)
        there = rows >= 0
        out = weight.new_zeros(len(rows), weight.shape[1])
        out[there] = weight[rows[there]]
        return out, there

    def rows_in_use(self) -> Tensor:
        """Return the rows that have keys, rising, (K,), int64."""
        return (self.stamps[: self.num_rows] >= 0).nonzero().squeeze(1)
