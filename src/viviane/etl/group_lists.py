"""Groups of sorted rows to lists and numbers, a piece at a time, in memory that does not grow with a group."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.etl.cells import make_list
from viviane.etl.sequence_config import SequenceColumn

_Ints = NDArray[np.int64]


class GroupColumn(Protocol):
    """Takes the values of each piece and gives those of the groups that ended in it."""

    def add(self, values: Any, groups: _Ints, num_groups: int) -> Any:
        """Return a column of num_groups - 1 rows: every group but the last one, which may continue.

        Args:
            values: those that count, in order.
            groups: the group of each, from 0: the one that was open.
            num_groups: groups that the piece has rows of, the open one included.
        """


def group_column(column: SequenceColumn, kind: pa.DataType) -> GroupColumn:
    """Return what makes one column of the result, from values of an Arrow type."""
    if column.take is None:
        return Lists(column, kind)
    if column.take in ("first", "last"):
        return Edge(column.take, kind)
    return Numbers(column.take, kind, column.name)


class Lists:
    """The first or last values of each group, after leaving out `skip` at that end.

    Example:
        >>> column = SequenceColumn(name="x", last=2, skip=1)
        >>> Lists(column, pa.int64()).add(pa.array([1, 2, 3, 4, 5]), np.array([0, 0, 0, 0, 1]), 2).to_pylist()
        [[2, 3]]
    """

    def __init__(self, column: SequenceColumn, kind: pa.DataType) -> None:
        self.column = column
        self._open: Any = pa.array([], kind)  # of the open group, as many as its list can need

    def add(self, values: Any, groups: _Ints, num_groups: int) -> Any:
        """See `GroupColumn`."""
        groups = np.concatenate([np.zeros(len(self._open), np.int64), groups])
        values = pa.concat_arrays([self._open, values])
        ends = np.cumsum(np.bincount(groups, minlength=num_groups)).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        most, skip = self.column.longest - self.column.skip, self.column.skip
        if self.column.first is not None:
            self._open = values.slice(int(starts[-1]), self.column.longest)
            low = np.minimum(starts + skip, ends)
            high = np.minimum(low + most, ends)
        else:
            self._open = values.slice(max(int(starts[-1]), len(values) - self.column.longest))
            high = np.maximum(ends - skip, starts)
            low = np.maximum(high - most, starts)
        lengths = (high - low)[:-1]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) + np.repeat(low[:-1], lengths)
        return make_list(offsets, values.take(pa.array(places)))


class Edge:
    """The first or the last value of each group, missing where it has none."""

    def __init__(self, take: str, kind: pa.DataType) -> None:
        self._lists = Lists(SequenceColumn.model_validate({"name": "x", take: 1}), kind)

    def add(self, values: Any, groups: _Ints, num_groups: int) -> Any:
        """See `GroupColumn`."""
        lists = self._lists.add(values, groups, num_groups)
        full = pc.list_value_length(lists).to_numpy(zero_copy_only=False) > 0
        places = np.cumsum(full) - 1
        return pc.list_flatten(lists).take(pa.array(places, mask=~full))


class Numbers:
    """count, sum, mean, min or max of each group; without a value count and sum are 0, the others missing.

    Values are added in their order, whatever the pieces, so that sums repeat bit by bit; whole numbers stay whole.

    Args:
        take: which of them.
        kind: type of the values.
        name: of the column, for messages.
    """

    def __init__(self, take: str, kind: pa.DataType, name: str = "") -> None:
        self.take, self.name = take, name
        # Whole numbers beyond 2^53 stay exact, but for the mean, which is a quotient.
        self._type: Any = np.int64 if take == "count" or (pa.types.is_integer(kind) and take != "mean") else np.float64
        self._open: tuple[Any, Any] = (self._type(0), 0)  # of the open group: number, values
        self._exact = 0  # the open group's sum of whole numbers, which int64 may not hold

    def add(self, values: Any, groups: _Ints, num_groups: int) -> Any:
        """See `GroupColumn`.

        Raises:
            DataError: a sum of whole numbers is beyond 64 bits.
        """
        counts = np.bincount(groups, minlength=num_groups).astype(np.int64)
        known = self._open[1] > 0
        counts[0] += self._open[1]
        if self.take == "count":
            self._open = (0, int(counts[-1]))
            return pa.array(counts[:-1])
        # Only a mean turns whole numbers into floats; those beyond 2^53 are rounded, as the quotient is anyway.
        cast = values.cast(pa.from_numpy_dtype(self._type), safe=self._type is np.int64)
        x = cast.to_numpy(zero_copy_only=False)
        total = np.zeros(num_groups, self._type)
        if self.take in ("min", "max"):
            limits: Any = np.iinfo if self._type is np.int64 else np.finfo
            total[:] = limits(self._type).max if self.take == "min" else limits(self._type).min
        total[0] = self._open[0] if known else total[0]
        combine: Any = {"min": np.minimum, "max": np.maximum}.get(self.take, np.add)
        combine.at(total, groups, x)
        if self.take == "sum" and self._type is np.int64:
            self._check_sums(total, x, groups)
        self._open = (total[-1], int(counts[-1]))
        num = counts[:-1]
        if self.take == "sum":
            return pa.array(total[:-1])
        done = total[:-1] / np.maximum(num, 1) if self.take == "mean" else total[:-1]
        return pa.array(done, mask=num == 0)

    def _check_sums(self, total: _Ints, x: _Ints, groups: _Ints) -> None:
        """Refuse sums that wrapped around; sizes in float64 show which groups may have, and those are added exactly."""
        sizes = np.zeros(len(total))
        sizes[0] = abs(self._exact)
        np.add.at(sizes, groups, np.abs(x.astype(np.float64)))
        last, exact = len(total) - 1, int(total[-1])
        for group in np.flatnonzero(sizes >= 2.0**62).tolist():
            true_sum = sum(x[groups == group].tolist()) + (self._exact if group == 0 else 0)
            if group == last:
                exact = true_sum
            elif not -(2**63) <= true_sum < 2**63:
                raise DataError(
                    "a sum of whole numbers is beyond 64 bits", where=f"column {self.name!r}", value=true_sum,
                    allowed="-2^63 to 2^63 - 1", fix='read the source as type "float", or take the mean',
                )  # fmt: skip
        self._exact = exact
