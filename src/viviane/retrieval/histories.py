"""Histories of users: lists of item ids, oldest first, in two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.batch import Bag
from viviane.core.errors import SchemaError
from viviane.core.tensors import check_mask, is_tensor, tensor_array
from viviane.core.whole_numbers import whole_numbers
from viviane.schema import RESERVED

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Histories:
    """Lists of item ids: row b holds values[offsets[b]:offsets[b + 1]], oldest first.

    Args:
        values: ids, (nnz,).
        offsets: (B + 1,), ascending from 0 to nnz.

    Raises:
        SchemaError: they are not.

    Example:
        >>> users = Histories.of([[3, 4, 5], [], [6]])
        >>> len(users), users[0].tolist(), users.newest(2)[0].tolist()
        (3, [3, 4, 5], [4, 5])
    """

    values: Ids
    offsets: Ids

    def __post_init__(self) -> None:
        for name, part in (("values", self.values), ("offsets", self.offsets)):
            if not isinstance(part, np.ndarray) or part.ndim != 1 or part.dtype != np.int64:
                form = f"{part.dtype} {part.shape}" if isinstance(part, np.ndarray) else type(part).__name__
                raise SchemaError("histories need arrays of int64, (n,)", where=f"Histories, {name}", value=form,
                                  fix="Histories.of(lists)")  # fmt: skip
        offsets = self.offsets
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(self.values) or (np.diff(offsets) < 0).any():
            raise SchemaError("offsets rise from 0 to the number of ids", where="Histories, offsets",
                              value=offsets[:16].tolist(), allowed=f"0 to {len(self.values)}")  # fmt: skip

    @classmethod
    def of(cls, rows: Any) -> Histories:
        """Return histories unchanged, or create them from lists of ids or an Arrow column of lists.

        Raises:
            SchemaError: an element is not a list of integers.
        """
        if isinstance(rows, Histories):
            return rows
        if hasattr(rows, "to_pylist"):
            rows = rows.to_pylist()
        try:
            rows = [tensor_array(row, "histories") if is_tensor(row) else row for row in rows]
            for place, row in enumerate(rows):
                check_mask(row, f"histories, row {place}", SchemaError)
            lists = [np.asarray(row if len(row) else [], dtype=None if len(row) else np.int64) for row in rows]
        except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors inside lists
            raise SchemaError(
                "a history must be a list of item ids", value=str(error), fix="pass a list for each row"
            ) from None
        for place, row in enumerate(lists):
            if row.ndim != 1 or row.dtype.kind not in "iu":
                what = "a history must be a list of integer item ids"
                raise SchemaError(what, where=f"row {place}", value=str(row.dtype))
        lengths = np.array([0, *map(len, lists)], dtype=np.int64)
        parts = [whole_numbers(row, np.int64, f"histories, row {place}") for place, row in enumerate(lists)]
        values = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return cls(values, lengths.cumsum())

    @classmethod
    def of_events(cls, user: Any, item: Any, time: Any = None) -> tuple[Histories, Ids]:
        """Group events by user, sorted by time; events of equal time keep their order.

        Args:
            user, item: (events,).
            time: (events,); None keeps the order of the events.

        Returns:
            The histories, and the user of each.

        Raises:
            DataError: an id is not an integer.
            SchemaError: the columns differ in length.

        Example:
            >>> users, who = Histories.of_events([8, 9, 8], [3, 4, 5], [20, 10, 10])
            >>> users.lists()[0].tolist(), who.tolist()
            ([5, 3], [8, 9])
        """
        users, items = whole_numbers(user, np.int64, "user"), whole_numbers(item, np.int64, "item")
        times = np.zeros(len(users)) if time is None else np.asarray(time)
        if not users.shape == items.shape == times.shape or users.ndim != 1:
            value = f"{users.shape}, {items.shape}, {times.shape}"
            raise SchemaError("there must be one user, item and time per event", value=value)
        try:
            order = np.lexsort((times, users))
        except (TypeError, ValueError) as error:
            raise SchemaError("times cannot be put in order", where="time", value=str(error)) from None
        who, counts = np.unique(users, return_counts=True)
        return cls(items[order], np.concatenate([[0], counts.cumsum()]).astype(np.int64)), who

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Ids:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Ids]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> Ids:
        """Number of ids of each row, (B,)."""
        return np.diff(self.offsets)

    @property
    def row_of(self) -> Ids:
        """The row of each value, (nnz,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def age(self) -> Ids:
        """Number of values after each value in its row, (nnz,)."""
        return self.offsets[1:][self.row_of] - 1 - np.arange(len(self.values))

    def where(self, keep: NDArray[np.bool_]) -> Histories:
        """Return the histories with only the selected values.

        Args:
            keep: mask, (nnz,).
        """
        counts = np.bincount(self.row_of[keep], minlength=len(self))
        return Histories(self.values[keep], np.concatenate([[0], counts.cumsum()]).astype(np.int64))

    def newest(self, count: int) -> Histories:
        """Return the newest values of each row."""
        return self.where(self.age < count)

    def before_last(self, count: int) -> Histories:
        """Return the histories without the last values of each row."""
        return self.where(self.age >= count)

    def padded(self, length: int) -> Histories:
        """Return the newest `length` values of each row, with shorter rows padded at the end.

        With equal lengths a GPU can replay captured steps: such a column has `hotness` in the schema.

        Example:
            >>> Histories.of([[3, 4, 5], [6]]).padded(2).values.tolist()
            [4, 5, 6, 0]
        """
        newest = self.newest(length)
        values = np.full((len(self), length), RESERVED.padding, dtype=np.int64)
        place = np.arange(len(newest.values)) - np.repeat(newest.offsets[:-1], newest.lengths)
        values[newest.row_of, place] = newest.values
        return Histories(values.reshape(-1), np.arange(len(self) + 1, dtype=np.int64) * length)

    def take(self, rows: Ids | slice | Sequence[int]) -> Histories:
        """Return some rows, in the order given.

        Example:
            >>> Histories.of([[3], [4, 5]]).take([1, 0]).values.tolist()
            [4, 5, 3]
        """
        chosen = np.arange(len(self))[rows]
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return Histories(self.values[np.repeat(self.offsets[chosen], lengths) + within], offsets)

    def bag(self, dtype: torch.dtype = torch.int64) -> Bag:
        """Return the ids as a bag column of a batch."""
        return Bag(torch.from_numpy(self.values).to(dtype), torch.from_numpy(self.offsets))

    def lists(self) -> list[Ids]:
        """Return one array per row."""
        return list(self)


def leave_one_out(users: Histories, held_out: int = 1) -> tuple[Histories, Ids, Ids]:
    """Split each user's events into the n-th last and those before it; users with none before it are dropped.

    Args:
        users: all events.
        held_out: n: 1 for the test, 2 for the validation of the usual protocol.

    Returns:
        The histories, the item to predict for each, and their user indices.

    Example:
        >>> before, item, user = leave_one_out(Histories.of([[3, 4, 5], [6]]))
        >>> before[0].tolist(), item.tolist(), user.tolist()
        ([3, 4], [5], [0])
    """
    kept = np.flatnonzero(users.lengths > held_out)
    chosen = users.take(kept)
    return chosen.before_last(held_out), chosen.values[chosen.offsets[1:] - held_out], kept


def together(parts: Iterable[Histories]) -> Histories:
    """Concatenate the values of several histories, row by row.

    Example:
        >>> together([Histories.of([[3], [4]]), Histories.of([[5], []])]).values.tolist()
        [3, 5, 4]
    """
    every = list(parts)
    row = np.concatenate([one.row_of for one in every])
    order = np.argsort(row, kind="stable")
    values = np.concatenate([one.values for one in every])[order]
    counts = np.bincount(row, minlength=len(every[0]))
    return Histories(values, np.concatenate([[0], counts.cumsum()]).astype(np.int64))


def asked_items(histories: Any, items: Any) -> tuple[Histories, Ids]:
    """Return histories and the items asked about, (B, K): each row has as many.

    Raises:
        SchemaError: they are no whole numbers, not of that shape, or of another number of rows.

    Example:
        >>> asked_items([[3], [4, 5]], [[4, 6], [3, 6]])[1].shape
        (2, 2)
    """
    users = Histories.of(histories)
    try:
        asked = np.asarray(items)
    except ValueError:  # rows of several lengths
        asked = np.empty(0)
    if asked.ndim != 2 or asked.dtype.kind not in "iu" or len(asked) != len(users):
        raise SchemaError("items must be whole numbers, (B, K)", where=f"items for {len(users)} histories",
                          value=f"{asked.dtype} {asked.shape}", allowed="as many rows as histories")  # fmt: skip
    return users, whole_numbers(asked, np.int64, "items")
