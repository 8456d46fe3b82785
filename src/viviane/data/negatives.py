"""Sampled negatives: items that differ from a row's own, redrawn in each epoch from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.data.dataset import Dataset
from viviane.schema import RESERVED, Schema

_Ids = NDArray[np.int64]
_ATTEMPTS: Final = 8  # draws by rejection; after this many, draw from the allowed items only
_ROWS: Final = 65_536  # rows per batch when counting a data set


class Negatives(Settings):
    """Which negatives to draw.

    Args:
        item: one-hot column with the item's id; the row's own item is never drawn.
        num: number of negatives per row, K, drawn independently, so that an item may repeat.
        column: name of the bag column of the negatives; None adds them as rows with label 0.
        alpha: an item is drawn with probability proportional to count^alpha: 0 uniform, 1 by popularity; 0.75 is
            common.
        user: one-hot column of the user; items that occur in any of the user's rows are never drawn. None: they may be
            drawn.
        item_columns: for rows: other one-hot columns of the item, which change with the item; all other columns keep
            the row's value.
        seed: changes the draws.
    """

    item: str
    num: int = Field(ge=1, le=10_000)
    column: str | None = "negatives"
    alpha: float = Field(default=0.0, ge=0, le=2)
    user: str | None = None
    item_columns: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _check(self) -> Negatives:
        if self.item_columns and self.column is not None:
            raise ValueError("item_columns are for negatives in rows: give column=None")
        if self.item in (self.user, *self.item_columns):
            raise ValueError(f"the item column {self.item!r} is given twice")
        return self


class NegativeSampler:
    """Draws ids of items, as a function of (seed, epoch, position in the epoch), so that a resumed run repeats them.

    Args:
        weights: (num_ids,), not negative; ids are drawn with probability proportional to their weight.
        seen: sorted, unique user x num_ids + item, for the pairs that are never drawn.
        seed: changes the draws.

    Raises:
        ConfigError: all weights are 0, or one is negative.

    Example:
        >>> sampler = NegativeSampler(np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]), seed=1)
        >>> sampler.draw(np.array([3, 4]), 3, epoch=0, first_place=0).tolist()
        [[5, 4, 4], [5, 5, 5]]
        >>> float(sampler.log_probability(np.array([3]))[0].round(3))
        -1.099
    """

    def __init__(self, weights: NDArray[np.float64], seen: _Ids | None = None, seed: int = 0) -> None:
        self.weights = np.array(weights, np.float64)
        total = float(self.weights.sum())
        if not total > 0 or not np.isfinite(total) or self.weights.min() < 0:
            raise ConfigError("negatives need non-negative weights, at least one above 0", value=total)
        self.seed, self.seen = seed, seen
        self._candidates = np.flatnonzero(self.weights)
        self._upto = np.cumsum(self.weights[self._candidates])
        self._total = total

    @property
    def num_ids(self) -> int:
        """Size of the range of ids."""
        return len(self.weights)

    def log_probability(self, ids: _Ids) -> NDArray[np.float64]:
        """Return ln of the probability that an id is drawn, -inf if it never is; corrects a sampled softmax."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.weights[ids] / self._total))

    def draw(self, items: _Ids, num: int, *, epoch: int, first_place: int, users: _Ids | None = None) -> _Ids:
        """Return negatives of rows, (B, num).

        Args:
            items: the rows' own items, (B,), never drawn for them.
            num: number of negatives per row, K.
            epoch: epoch of the draw.
            first_place: position of the first row in the epoch.
            users: (B,), whose seen items are never drawn; required if `seen` was given.

        Raises:
            DataError: no item is left to draw for a row.
        """
        found = np.empty((len(items), num), np.int64)
        rows, places = (axis.ravel() for axis in np.indices(found.shape))
        for attempt in range(_ATTEMPTS):
            u = self._uniform(epoch, first_place + rows, places, attempt)
            found[rows, places] = self._candidates[np.searchsorted(self._upto, u * self._upto[-1], side="right")]
            refused = self._refused(found[rows, places], rows, items, users)
            rows, places = rows[refused], places[refused]
            if not len(rows):
                return found
        u = self._uniform(epoch, first_place + rows, places, _ATTEMPTS)
        for row in np.unique(rows):
            here = rows == row
            left = self.weights[self._candidates].copy()
            left[self._refused(self._candidates, np.full(len(left), row), items, users)] = 0.0
            upto = np.cumsum(left)
            if not upto[-1] > 0:
                who = "" if users is None else f"user id {users[row]}, "
                raise DataError(
                    "no item is left to draw as a negative", where=f"{who}item id {items[row]}",
                    fix="remove users who have seen every item, or allow seen items",
                )  # fmt: skip
            found[row, places[here]] = self._candidates[np.searchsorted(upto, u[here] * upto[-1], side="right")]
        return found

    def _refused(self, drawn: _Ids, rows: _Ids, items: _Ids, users: _Ids | None) -> NDArray[np.bool_]:
        refused: NDArray[np.bool_] = drawn == items[rows]
        if self.seen is not None and len(self.seen):
            if users is None:
                raise ConfigError("excluding seen items needs the users of the rows")
            pairs = users[rows].astype(np.int64) * self.num_ids + drawn
            at = np.minimum(np.searchsorted(self.seen, pairs), len(self.seen) - 1)
            refused |= self.seen[at] == pairs
        return refused

    def _uniform(self, epoch: int, rows: _Ids, places: _Ids, attempt: int) -> NDArray[np.float64]:
        """Return a value in [0, 1) per draw: SplitMix64's finalizer applied to each part of (seed, epoch, row, ...)."""
        with np.errstate(over="ignore"):
            state = _mixed(np.full(len(rows), self.seed, np.uint64))
            for part in (epoch, rows, places, attempt):
                state = _mixed(state + np.asarray(part).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return (state >> np.uint64(11)).astype(np.float64) / 2.0**53


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def check_negatives(negatives: Negatives, schema: Schema) -> None:
    """Compare settings with a schema.

    Raises:
        SchemaError: a column is missing, not one-hot, or has raw ids; the new column's name is taken.
    """
    for name in (negatives.item, *([negatives.user] if negatives.user else []), *negatives.item_columns):
        column = schema.categorical_column(name)
        if column.kind != "one_hot":
            raise SchemaError("negatives need one-hot columns", value=name, allowed="one id per row")
    if schema.categorical_column(negatives.item).num_ids is None:
        fix = "categorify or hash the item's column"
        raise SchemaError("raw ids have no range to draw negatives from", value=negatives.item, fix=fix)
    taken = (*schema.column_names, *schema.ignored)
    if negatives.column in taken:
        raise SchemaError("the column of the negatives already exists", value=negatives.column, fix="rename it")
    if negatives.column is None and not schema.labels:
        raise SchemaError("negatives in rows need a label", fix="add a label of 1")


def _narrow(data: Dataset, negatives: Negatives) -> Dataset:
    """Return the data with only the counted columns, if the format can read single columns."""
    if data.format.format != "parquet":
        return data
    names = [negatives.item, *([negatives.user] if negatives.user else []), *negatives.item_columns]
    return Dataset(data.path, data.schema.select(names))


class Population:
    """Statistics of data sets for drawing: counts of items, seen pairs, and columns of each item.

    Memory: 8 bytes per item and column, and 8 per pair if there is a user column.
    """

    def __init__(self, negatives: Negatives, data: Dataset, more: Sequence[Dataset] = ()) -> None:
        num_ids = data.schema.categorical_column(negatives.item).id_range
        self.counts = np.zeros(num_ids, np.int64)
        self.item_columns = {name: np.full(num_ids, RESERVED.unknown, np.int64) for name in negatives.item_columns}
        pairs: list[Any] = []
        for number, source in enumerate((data, *more)):
            with _narrow(source, negatives).reader(_ROWS, num_threads=1) as reader:
                for batch in reader:
                    items = batch.bag(negatives.item).values.numpy().astype(np.int64)
                    if number == 0:
                        self.counts += np.bincount(items, minlength=num_ids)
                        for name, known in self.item_columns.items():
                            known[items] = batch.bag(name).values.numpy()
                    if negatives.user is not None:
                        users = batch.bag(negatives.user).values.numpy().astype(np.int64)
                        pairs.append(np.unique(users * num_ids + items))
        self.counts[: RESERVED.first] = 0  # padding, missing and unknown are not items
        self.seen = None if negatives.user is None else np.unique(np.concatenate([np.zeros(0, np.int64), *pairs]))

    def sampler(self, negatives: Negatives) -> NegativeSampler:
        """Return the sampler of the items that occur.

        Raises:
            DataError: no item occurs.
        """
        if not self.counts.any():
            raise DataError("the data set has no items to draw", where=f"column {negatives.item!r}")
        weights = np.where(self.counts > 0, self.counts.astype(np.float64) ** negatives.alpha, 0.0)
        return NegativeSampler(weights, self.seen, negatives.seed)
