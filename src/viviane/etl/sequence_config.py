"""Settings of rows to sequences: which rows belong together, and what is made of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.core.errors import suggest
from viviane.etl.columns import CategoricalSpec, HashTo, Input, InputColumn
from viviane.etl.conditions import Filter
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import Names, key_names

Take = Literal["first", "last", "count", "sum", "mean", "min", "max"]
SESSION = "session"


class SequenceColumn(Settings):
    """A column of the result: a list of the group's values in order, or one number or value of them.

    Args:
        name: of the new column.
        source: input column; default, the same name.
        first, last: list this many values from the start, or up to the end, of the group; one of them, or `take`.
        skip: leave out this many at that end before: the last 20 without the very last are `last: 20, skip: 1`.
        take: one value in place of a list. `count` counts values, `first` and `last` take one as it is.
        where: rows that count for this column, so that clicked and passed-over items make two lists.
    """

    name: str = Field(min_length=1)
    source: str | None = None
    first: int | None = Field(default=None, ge=1, le=100_000)
    last: int | None = Field(default=None, ge=1, le=100_000)
    skip: int = Field(default=0, ge=0, le=100_000)
    take: Take | None = None
    where: Filter | None = None

    @model_validator(mode="after")
    def _check(self) -> SequenceColumn:
        if sum(one is not None for one in (self.first, self.last, self.take)) != 1:
            raise ValueError(f"column {self.name!r} takes exactly one of first, last and take")
        if self.skip and self.take is not None:
            raise ValueError(f"column {self.name!r}: skip is for lists")
        return self

    @property
    def column(self) -> str:
        """The input column."""
        return self.source or self.name

    @property
    def longest(self) -> int:
        """How many values of a group have to be remembered."""
        return (self.first or self.last or 1) + self.skip


class SequenceConfig(Settings):
    """Rows of one key, in order of time, to one row with lists.

    The result is Parquet for an ordinary EtlConfig, whose input columns then have `"list": true`. Rows with a missing
    key or time belong to no group, and are counted. Missing values are left out of lists and numbers.

    Args:
        input: how to read the raw files.
        by: key, one column or several; they are columns of the result.
        order_by: a number or time; rows of one time keep the order of the input.
        gap: a pause above it, in seconds (in the units of order_by where that is a number), begins a new session: one
            row each, numbered from 0 in the column `session`.
        columns: of the result.
        min_rows: groups of fewer rows are left out, and counted.
        filters: rows to use at all.

    Example:
        >>> config = SequenceConfig(
        ...     input={"columns": [{"name": "user"}, {"name": "item"}, {"name": "time", "type": "int"}]},
        ...     by="user", order_by="time", columns=[{"name": "items", "source": "item", "last": 20}])
        >>> config.columns[0].longest
        20
    """

    format: Literal["viviane-sequences"] = "viviane-sequences"
    version: Literal[1] = 1
    input: Input
    by: Names
    order_by: str
    gap: float | None = Field(default=None, gt=0)
    columns: tuple[SequenceColumn, ...] = Field(min_length=1)
    min_rows: int = Field(default=1, ge=1)
    filters: tuple[Filter, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        return key_names(self.by)

    @property
    def staging(self) -> EtlConfig:
        """A config that reads and types the columns; what it would encode is never written."""
        wanted = [*self.keys, self.order_by, *(one.column for one in self.columns)]
        wanted += [one.column for one in [*self.filters, *(one.where for one in self.columns if one.where)]]
        key = CategoricalSpec(name="read", source=self.keys[0], encoding=HashTo(num_ids=4))
        return EtlConfig(
            input=self.input,
            categorical=(key,),
            ignored=tuple(name for name in dict.fromkeys(wanted) if name != "read"),
        )

    def find(self, name: str) -> InputColumn:
        """Return an input column."""
        for column in self.input.columns:
            if column.name == name:
                return column
        known = [column.name for column in self.input.columns]
        raise ValueError(f"no input column {name!r}; {suggest(name, known)}")

    @model_validator(mode="after")
    def _check(self) -> SequenceConfig:
        names = [*self.keys, *([SESSION] if self.gap is not None else []), *(one.name for one in self.columns)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"column named twice: {', '.join(twice)}")
        for name in self.keys:
            self._single(name, ("string", "int", "hex"), "of the key")
        self._single(self.order_by, ("int", "float", "timestamp"), "to order by")
        for one in self.columns:
            if one.take is None:
                self._single(one.column, ("string", "int", "hex", "float"), "to list")
            elif one.take not in ("first", "last", "count"):
                self._single(one.column, ("int", "float"), f"to take the {one.take} of")
            else:
                self._single(one.column, ("string", "int", "hex", "float", "timestamp"), "")
        for condition in [*self.filters, *(one.where for one in self.columns if one.where)]:
            self._single(condition.column, ("string", "int", "hex", "float", "timestamp"), "to compare")
        return self

    def _single(self, name: str, types: tuple[Any, ...], what: str) -> None:
        column = self.find(name).staged
        if column.is_list or column.type not in types:
            found = "a list" if column.is_list else f"of type {column.type}"
            raise ValueError(f"the column {what} {name!r} is {found}: give single {', '.join(types)} values")
