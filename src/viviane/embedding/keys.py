"""From keys to rows of a storage: the policies of tables, and the record of what broke them.

Shapes: N rows of keys, F columns, each of one feature.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.core.errors import DataError, KeyRangeError, VivianeError
from viviane.embedding.config import TableConfig
from viviane.ops.capture import is_capturing, refuse_capture
from viviane.ops.key_rows import (
    CLEAN,
    HASH,
    RAISE,
    REPLACE,
    SKIP,
    ColumnRule,
    KeyRules,
    are_trusted,
    bag_rows,
    hashed,
    key_rows,
    lasting_record,
)

_REPLAYED = "a replay of a CUDA graph"


def hash_keys(keys: Tensor, table: TableConfig) -> Tensor:
    """Map keys evenly into a table, the same on every device: row = mix(key) mod num_rows.

    A table with a padding row maps into its other rows: row = mix(key) mod (num_rows - 1), plus one from the
    padding row on. `mix` is that of `viviane.ops.key_rows.mix`.

    Example:
        >>> hash_keys(torch.tensor([-1, 10**12]), TableConfig(name="t", num_rows=100, dim=1)).tolist()
        [33, 35]
    """
    return hashed(keys, table.num_rows, -1 if table.padding_id is None else table.padding_id)


def rows_of_keys(keys: Tensor, table: TableConfig) -> Tensor:
    """Return the rows that keys of any order look up, as the table's `out_of_range` says; those that none are left out.

    Example:
        >>> rows_of_keys(torch.tensor([4, -1, 2]), TableConfig(name="t", num_rows=4, dim=1, out_of_range="ignore"))
        tensor([2])
    """
    keys = keys.to(torch.int64)
    inside = (keys >= 0) & (keys < table.num_rows)
    if table.out_of_range == "hash":
        return torch.where(inside, keys, hash_keys(keys, table))
    if table.out_of_range == "default" and table.default_id is not None:
        return torch.where(inside, keys, table.default_id)
    return keys[inside]


@dataclass(frozen=True)
class Violation:
    """What broke a rule on a GPU, still on the device: record is [any, place, value]."""

    record: Tensor
    origin: str
    name: tuple[str, ...] = field(default=(), kw_only=True)
    """Of the lasting record that takes it in."""

    @property
    def num_lookups(self) -> int:
        """Features whose part of the batch is kept for the message."""
        return 1

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
class BagKeyOutOfRange(Violation):
    """A key outside its table, in one of several features' bags; place counts their keys behind one another."""

    features: tuple[str, ...]
    tables: tuple[TableConfig, ...]
    starts: tuple[int, ...]
    offsets: tuple[Tensor, ...]

    @property
    def num_lookups(self) -> int:
        """Features whose offsets are kept, and the memory of the batch that holds them."""
        return len(self.features)

    def error(self, place: int, value: int) -> VivianeError:
        """Return the error of the key at `place`."""
        f = bisect_right(self.starts, place) - 1
        own = KeyOutOfRange(self.record, self.origin, self.features[f : f + 1], self.tables[f : f + 1], self.offsets[f])
        return own.error(place - self.starts[f], value)


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


class Violations(deque[Violation]):
    """Errors that GPUs found and that are not read yet: records of single batches, and those that CUDA graphs write.

    A graph's record keeps the first offender of all replays until `check` reads and empties it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lasting: dict[tuple[str, ...], Violation] = {}
        self._words: dict[tuple[str, ...], Tensor] = {}

    def __reduce__(self) -> Any:
        return Violations, ()  # a copy of a collection has records of its own

    @property
    def num_lookups(self) -> int:
        """Lookups whose records of single batches wait."""
        return sum(one.num_lookups for one in self)

    def words_for(self, name: tuple[str, ...], device: torch.device) -> Tensor:
        """Return the lasting record of a name, (4,), int64; made once, before a graph is recorded."""
        key = (*name, str(device))
        if key not in self._words:
            refuse_capture(device, "a new kind of batch", fix="run an iteration with such a batch before the capture")
            self._words[key] = lasting_record(device)
        return self._words[key]

    def keep(self, name: tuple[str, ...], violation: Violation) -> None:
        """Keep a violation whose record a graph continues writing."""
        self._lasting[*name, str(violation.record.device)] = violation

    @contextmanager
    def apart(self) -> Iterator[list[Violation]]:
        """Give what is found in a block to a list: of a lookup whose batch comes later."""
        before = list(self)
        found: list[Violation] = []
        self.clear()
        try:
            yield found
        finally:
            found += self
            self.clear()
            self.extend(before)

    def merge_into_lasting(self, found: Sequence[Violation]) -> None:
        """Let lasting records that are empty take the records of single batches, in the order of the current stream."""
        for one in found:
            words = self.words_for(one.name, one.record.device)[:3]
            torch.where(words[:1] != 0, words, one.record, out=words)
            self.keep(one.name, replace(one, record=words, origin=_REPLAYED))

    def lasting_records(self) -> list[Tensor]:
        """Return the records that graphs write."""
        return [one.record for one in self._lasting.values()]

    def check(self) -> None:
        """Wait once for each device, raise the first violation, and forget them all; nothing while a graph is recorded.

        Raises:
            KeyRangeError, DataError: what was found.
        """
        waiting = [*self, *self._lasting.values()]
        if not waiting or any(one.record.is_cuda and is_capturing(one.record.device) for one in waiting):
            return
        self.clear()
        try:
            raise_first(waiting)
        except VivianeError:
            for lasting in self._lasting.values():
                lasting.record.zero_()
            raise


def raise_first(violations: Sequence[Violation]) -> None:
    """Wait once for the device, and raise the first violation among the records, if there is one."""
    if not violations:
        return
    if len(violations) == 1:
        records = [violations[0].record.tolist()]
    else:
        records = torch.stack([one.record for one in violations]).tolist()
    for violation, (found, place, value) in zip(violations, records, strict=True):
        if found:
            raise violation.error(place, value)


def report(violation: Violation, violations: Violations, name: tuple[str, ...]) -> None:
    """Raise at once on the CPU; on a GPU leave the record for the next check, so that nothing waits.

    While a CUDA graph is recorded the violation's record must be, or flows into, the lasting one of its name.
    """
    device = violation.record.device
    if device.type == "cpu":
        raise_first([violation])
        return
    words = violations.words_for(name, device)
    if not is_capturing(device):
        violations.append(replace(violation, name=name))
        return
    record = words[:3]
    if violation.record.data_ptr() != words.data_ptr():
        # Not copied: a graph's copies have no priority, and would wait for all blocks of an update beside them.
        torch.where(record[:1] != 0, record, violation.record, out=record)
    violations.keep(name, replace(violation, record=record, origin=_REPLAYED))


def check_key_type(keys: object, feature: str) -> None:
    """Refuse keys that are no tensor of int32 or int64."""
    if not isinstance(keys, Tensor):
        allowed = "a tensor of int32 or int64, or a Bag"
        raise DataError(
            "keys must be a tensor", where=f"feature {feature!r}", value=type(keys).__name__, allowed=allowed
        )
    if keys.dtype not in (torch.int32, torch.int64):
        raise DataError("keys must be whole numbers", where=f"feature {feature!r}", value=str(keys.dtype))
    check_memory(keys, f"feature {feature!r}")


def check_memory(tensor: Tensor, where: str) -> None:
    """Refuse a tensor whose numbers do not lie in memory one by one: sparse, nested, or of the meta device."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        value = "a nested tensor" if tensor.is_nested else f"{tensor.layout} on {tensor.device}"
        raise DataError("a tensor must be dense, and in memory", where=where, value=value, fix="pass tensor.to_dense()")


class _KeyMap:
    """The policies of some features' tables, as kernels read them; arguments as of `RowMap`."""

    def __init__(
        self,
        features: Sequence[str],
        tables: Sequence[TableConfig],
        bases: Sequence[int],
        null_row: int,
        violations: Violations,
        device: torch.device,
    ) -> None:
        self.features = tuple(features)
        self.tables = tuple(tables)
        self.violations = violations
        rules = [column_rule(table, base, null_row) for table, base in zip(tables, bases, strict=True)]
        refuse_capture(device, "a new kind of batch", fix="run an iteration with such a batch before the capture")
        self._rules = KeyRules(rules, null_row, device)
        self._raises = any(rule.policy == RAISE for rule in rules)

    @property
    def rules(self) -> KeyRules:
        """The policies as kernels read them."""
        return self._rules

    @property
    def row_dtype(self) -> torch.dtype:
        """The type of rows."""
        return self._rules.row_dtype


class RowMap(_KeyMap):
    """Maps the keys of some features, one a column, to rows of their storage.

    Args:
        features: a name per column.
        tables: a table per column.
        bases: first storage row of each column's table.
        null_row: the first of the storage's two zero rows; see `viviane.ops.key_rows`.
        violations: where a GPU leaves what it found for "raise" tables; read by `EmbeddingCollection.check`.
        device: of the keys.
        columns: which column of the keys each feature reads; None: they are all, in order.
    """

    def __init__(
        self,
        features: Sequence[str],
        tables: Sequence[TableConfig],
        bases: Sequence[int],
        null_row: int,
        violations: Violations,
        device: torch.device,
        columns: Sequence[int] | None = None,
    ) -> None:
        super().__init__(features, tables, bases, null_row, violations, device)
        self._columns = None if columns is None else torch.tensor(columns, dtype=torch.int64, device=device)

    @property
    def columns(self) -> Tensor | None:
        """Which column of the keys each feature reads, (F,), int64; None: they are all, in order."""
        return self._columns

    def __call__(
        self, keys: Tensor, offsets: Tensor | None = None, origin: str = "", out: Tensor | None = None
    ) -> Tensor:
        """Return the storage rows of keys, (N, F).

        Args:
            keys: (N, C), int32 or int64.
            offsets: of the bags, where the keys are entries of bags, for messages.
            origin: of the batch, for messages.
            out: where the rows go; None: a new tensor.
        """
        check_key_type(keys, self.features[0])
        name = ("key", *self.features)
        raises = self._raises and not are_trusted()
        device, kept = keys.device, None
        if raises and keys.is_cuda and is_capturing(device):
            kept = self.violations.words_for(name, device)
        rows, record = key_rows(keys, self._rules, self._columns, kept, out)
        if raises and record is not CLEAN:
            report(KeyOutOfRange(record, origin, self.features, self.tables, offsets), self.violations, name)
        return rows


class BagRowMap(_KeyMap):
    """Maps the keys of several features' bags to rows of their storage, at once; see `viviane.ops.key_rows.bag_rows`.

    Arguments are those of `RowMap`, without columns.
    """

    def __call__(self, bags: Sequence[Bag], origin: str = "", out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the storage rows of all keys, (N,), and the offsets of all bags, (F * B + 1,).

        Args:
            bags: of each feature.
            origin: of the batch, for messages.
            out: where the rows go; None: a new tensor.
        """
        for bag, feature in zip(bags, self.features, strict=True):
            check_key_type(bag.values, feature)
        keys, offsets = [bag.values for bag in bags], tuple(bag.offsets for bag in bags)
        device, name = offsets[0].device, ("bag key", *self.features)
        raises = self._raises and not are_trusted()
        kept = None
        if raises and device.type == "cuda" and is_capturing(device):
            kept = self.violations.words_for(name, device)
        rows, joined, record = bag_rows(keys, offsets, self._rules, kept, out)
        if raises:
            starts = (0, *accumulate(len(one) for one in keys[:-1]))
            found = BagKeyOutOfRange(record, origin, self.features, self.tables, starts, offsets)
            report(found, self.violations, name)
        return rows, joined


_POLICIES = {"raise": RAISE, "default": REPLACE, "hash": HASH, "ignore": SKIP}


def column_rule(table: TableConfig, base: int, null_row: int) -> ColumnRule:
    """Return a table's policies as `viviane.ops.key_rows` takes them.

    Args:
        table: its settings.
        base: its first row in the storage.
        null_row: the first of the storage's two zero rows.

    Example:
        >>> column_rule(TableConfig(name="t", num_rows=5, dim=1, out_of_range="ignore"), 10, 99).policy == SKIP
        True
    """
    # "default" without a row of its own reads zeros, but counts in a mean: the second of the zero rows.
    replacement = null_row + 1 if table.default_id is None else base + table.default_id
    if table.default_id is not None and table.default_id == table.padding_id:
        replacement = null_row
    padding = -1 if table.padding_id is None else table.padding_id
    return ColumnRule(base, table.num_rows, _POLICIES[table.out_of_range], replacement, padding)
