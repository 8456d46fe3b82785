"""From keys to rows of a storage: the range check, its policies, and the record of what broke it.

Shapes: N rows of keys, F columns, each of one feature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from viviane.core.errors import DataError, KeyRangeError, VivianeError
from viviane.embedding.config import TableConfig

_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def hash_keys(keys: Tensor, table: TableConfig) -> Tensor:
    """Map keys evenly into a table, the same on every device: row = mix(key) mod num_rows.

    With x the key as 64 bits without sign, arithmetic modulo 2^64 and >> shifting in zeros, mix is

        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) >> 1

    A table with a padding row maps into its other rows: row = mix(key) mod (num_rows - 1), plus one from the
    padding row on.

    Example:
        >>> hash_keys(torch.tensor([-1, 10**12]), TableConfig(name="t", num_rows=100, dim=1)).tolist()
        [33, 35]

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    x = keys.to(torch.int64)
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    x = _shift(x ^ _shift(x, 31), 1)
    if table.padding_id is None:
        return x % table.num_rows
    x = x % (table.num_rows - 1)
    return x + (x >= table.padding_id)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Violation:
    """What broke a rule on a GPU, still on the device: record is [any, place, value]."""

    record: Tensor
    origin: str

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error of the first offender, once the record was read."""
        raise TypeError(f"{type(self).__name__} does not define error")

    def where(self, what: str, row: int) -> str:
        """Name the place for the message."""
        return f"{what}, row {row} of the batch" + (f", {self.origin}" if self.origin else "")


@dataclass(frozen=True)
class KeyOutOfRange(Violation):
    """A key outside its table; place counts the flattened keys (N, F)."""

    features: tuple[str, ...]
    tables: tuple[TableConfig, ...]
    offsets: Tensor | None

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error of the key at `place`."""
        row, column = divmod(place, len(self.features))
        if self.offsets is not None:
            row = int(torch.searchsorted(self.offsets, row, right=True)) - 1
        table = self.tables[column]
        return KeyRangeError(
            "key out of range",
            where=self.where(f"feature {self.features[column]!r}, table {table.name!r}", row),
            value=value,
            allowed=f"0 <= key < {table.num_rows}",
            fix="raise the table's num_rows, or set its out_of_range to 'default', 'hash' or 'ignore'",
        )


@dataclass(frozen=True)
class BagTooLong(Violation):
    """A bag with more ids than a "concat" has places; place is the row of the batch."""

    feature: str
    max_length: int

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error of the bag at `place`."""
        return DataError(
            "a bag is longer than its feature's max_length",
            where=self.where(f"feature {self.feature!r}", place),
            value=value,
            allowed=f"at most {self.max_length} ids",
            fix="raise the feature's max_length, or cut the bags when the data is prepared",
        )


def raise_first(violations: Sequence[Violation]) -> None:
    """Wait once for the device, and raise the first violation among the records, if there is one."""
    if not violations:
        return
    records = torch.stack([one.record for one in violations]).tolist()
    for violation, (found, place, value) in zip(violations, records, strict=True):
        if found:
            raise violation.error(place, value)


def report(violation: Violation, violations: deque[Violation]) -> None:
    """Raise at once on the CPU; on a GPU leave the record for the next check, so that nothing waits."""
    if violation.record.device.type == "cpu":
        raise_first([violation])
    else:
        violations.append(violation)


class RowMap:
    """Maps the keys of some features, one a column, to rows of their storage.

    Args:
        features: a name per column.
        tables: a table per column.
        bases: first storage row of each column's table.
        null_row: the storage row that is always zero.
        violations: where a GPU leaves what it found for "raise" tables; read by `EmbeddingCollection.check`.
    """

    def __init__(
        self,
        features: Sequence[str],
        tables: Sequence[TableConfig],
        bases: Sequence[int],
        null_row: int,
        violations: deque[Violation],
        device: torch.device,
    ) -> None:
        self.features = tuple(features)
        self.tables = tuple(tables)
        self.null_row = null_row
        self.violations = violations
        self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._sizes = torch.tensor([table.num_rows for table in tables], dtype=torch.int64, device=device)
        raising = [table.out_of_range == "raise" for table in tables]
        self._raising = torch.tensor(raising, device=device) if any(raising) else None
        padding = [-1 if table.padding_id is None else table.padding_id for table in tables]
        self._padding = torch.tensor(padding, dtype=torch.int64, device=device) if max(padding) >= 0 else None

    def __call__(self, keys: Tensor, offsets: Tensor | None = None, origin: str = "") -> tuple[Tensor, Tensor | None]:
        """Return the storage rows of keys, (N, F), int64, and which keys are out of range, or None if none is.

        Args:
            keys: (N, F), int32 or int64.
            offsets: of the bags, where the keys are entries of bags, for messages.
            origin: of the batch, for messages.
        """
        if keys.dtype not in (torch.int32, torch.int64):
            feature = self.features[0]
            raise DataError("keys must be whole numbers", where=f"feature {feature!r}", value=str(keys.dtype))
        on_cpu = keys.device.type == "cpu"
        if on_cpu and self._in_range(keys):
            return keys + self._bases, None
        bad = (keys < 0) | (keys >= self._sizes)
        self._report(keys, bad, offsets, origin)
        rows = torch.where(bad, self.null_row, keys + self._bases)
        for column, table in enumerate(self.tables):
            if table.out_of_range == "hash":
                replacement = hash_keys(keys[:, column], table) + self._bases[column]
            elif table.default_id is not None:
                replacement = self._bases[column] + table.default_id
            else:
                continue
            rows[:, column] = torch.where(bad[:, column], replacement, rows[:, column])
        return rows, bad

    def counted(self, keys: Tensor, bad: Tensor | None) -> Tensor | None:
        """Return which entries of a bag count in its mean or mask, (N,), bool; None where all do."""
        (table,) = self.tables
        counted = None if table.padding_id is None else keys != table.padding_id
        if bad is not None and table.out_of_range in ("ignore", "raise"):
            good = ~bad.squeeze(1)
            counted = good if counted is None else counted & good
        return counted

    def _in_range(self, keys: Tensor) -> bool:
        if keys.numel() == 0:
            return True
        low, high = keys.aminmax(dim=0)
        return bool(((low >= 0) & (high < self._sizes)).all())

    def _report(self, keys: Tensor, bad: Tensor, offsets: Tensor | None, origin: str) -> None:
        if self._raising is None:
            return
        wrong = (bad & self._raising).flatten()
        if keys.numel() == 0:
            return
        place = wrong.to(torch.uint8).argmax().view(1)
        key = keys.flatten().index_select(0, place)  # indexing by a 0-dim tensor would wait for a GPU
        record = torch.cat([wrong.any().view(1).to(torch.int64), place, key.to(torch.int64)])
        report(KeyOutOfRange(record, origin, self.features, self.tables, offsets), self.violations)
