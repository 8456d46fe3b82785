"""Columns made from other columns before any encoding: settings only; what they compute is in `deriving`.

Row derivations look at one row; lags, leads and histories look at other rows of the run; group derivations look up
what was learned from the training rows of a key.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from viviane.config.base import Settings
from viviane.etl.columns import Input
from viviane.etl.conditions import Filter
from viviane.etl.functions import FUNCTIONS
from viviane.etl.saved import without

Kind: TypeAlias = Literal["float", "int", "string"]
Names: TypeAlias = str | Annotated[tuple[str, ...], Field(min_length=1)]
Statistic: TypeAlias = Literal["count", "mean", "std", "var", "min", "max", "sum", "median", "nunique"]


class Column(Protocol):
    """What a derivation asks of the columns that it is made from."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def type(self) -> Any:
        """Type of its values."""

    @property
    def is_list(self) -> bool:
        """Whether a row holds several values."""


Made: TypeAlias = tuple[str, Literal["float", "int", "string", "hex"], bool]
"""Name, type and whether a list, of a derived column."""
Find: TypeAlias = Callable[[str], Column]


class ValueMap(Settings):
    """Rename values; in a list column, every element.

    Args:
        values: new value by old one; null makes it missing. Old values are written as text, whole numbers too.
        others: values that are not named stay, or become missing.
        missing: the new value of a missing one; None leaves it missing.
        result: type of the new values; default, that of the source.
    """

    type: Literal["map"] = "map"
    name: str = Field(min_length=1)
    source: str
    values: dict[str, str | int | float | None]
    others: Literal["keep", "missing"] = "keep"
    missing: str | int | float | None = None
    result: Kind | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (self.source,)

    def made(self, find: Find) -> list[Made]:
        """The new column; a source or a value of a wrong type is a ValueError."""
        source = find(self.source)
        if source.type not in ("string", "int"):
            raise ValueError(f"{self.name!r} maps column {self.source!r} of type {source.type}: make it string or int")
        result: Kind = self.result or source.type
        if result != source.type and self.others == "keep":
            raise ValueError(f'{self.name!r} maps {source.type} to {result}: add "others": "missing"')
        wanted = {"string": (str,), "int": (int,), "float": (int, float)}[result]
        for new in [*self.values.values(), self.missing]:
            if new is not None and (not isinstance(new, wanted) or isinstance(new, bool)):
                raise ValueError(f'{self.name!r} maps to {new!r}, which is not {result}: set "result" or correct it')
        for old in self.values:
            if source.type == "int" and not old.removeprefix("-").isdecimal():
                raise ValueError(f"{self.name!r} maps {old!r}, but column {self.source!r} holds whole numbers")
        return [(self.name, result, source.is_list)]


class DatePart(Settings):
    """A part of a time, as a whole number: month and day from 1, weekday 0 (Monday) to 6, weekend 0 or 1.

    In a list column, of every element.

    Args:
        unit: of a source of whole numbers that count from 1970; a timestamp needs none.
    """

    type: Literal["date_part"] = "date_part"
    name: str = Field(min_length=1)
    source: str
    part: Literal["year", "month", "day", "weekday", "weekend", "hour", "minute"]
    unit: Literal["s", "ms", "us"] | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (self.source,)

    def made(self, find: Find) -> list[Made]:
        """The new column; a source that holds no times is a ValueError."""
        source = find(self.source)
        if source.type not in ("timestamp", "int"):
            raise ValueError(f"{self.name!r}: column {self.source!r} must hold timestamps or whole numbers")
        if (source.type == "int") != (self.unit is not None):
            fix = 'add "unit": "s"' if source.type == "int" else "leave out unit"
            raise ValueError(f"{self.name!r}: column {self.source!r} is of type {source.type}: {fix}")
        return [(self.name, "int", source.is_list)]


class MissingIndicator(Settings):
    """1 where the source is missing, else 0: an indicator for a column that `fill` fills.

    Args:
        elements: of a list column, a list with the indicator of each value; a missing list stays missing. Otherwise a
            row of a list column has one indicator: whether the list itself is missing.
    """

    type: Literal["missing_indicator"] = "missing_indicator"
    name: str = Field(min_length=1)
    source: str
    elements: bool = False

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "elements")

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (self.source,)

    def made(self, find: Find) -> list[Made]:
        """The new column; elements of a source that is no list are a ValueError."""
        if self.elements and not find(self.source).is_list:
            raise ValueError(f"{self.name!r}: column {self.source!r} is no list: leave out elements")
        find(self.source)
        return [(self.name, "int", self.elements)]


class ListSlice(Settings):
    """A part of each list, as Python slices it, made as long as `pad_to` where it is shorter.

    Args:
        start, end: places from 0, or from the end if negative; end is not part of it, None is behind the last value.
        pad_to: length of every list; start and end have to bound the part to it. A missing list stays missing.
        pad_value: what is added; None adds missing values.
        pad_side: where it is added.
    """

    type: Literal["list_slice"] = "list_slice"
    name: str = Field(min_length=1)
    source: str
    start: int = Field(default=0, ge=-(2**31), lt=2**31)
    end: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    pad_to: int | None = Field(default=None, ge=1, le=100_000)
    pad_value: str | int | float | None = None
    pad_side: Literal["left", "right"] = "right"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (self.source,)

    @property
    def longest(self) -> int | None:
        """Values of the longest part; None if it grows with the list."""
        end = self.end
        if self.start < 0:
            if end is None:
                return -self.start
            return max(0, end - self.start) if end < 0 else min(end, -self.start)
        return max(0, end - self.start) if end is not None and end >= 0 else None

    def made(self, find: Find) -> list[Made]:
        """The new column; a source that is no list, or padding of another type or length, is a ValueError."""
        source = find(self.source)
        if not source.is_list or source.type == "timestamp":
            what = "a list of timestamps" if source.is_list else "no list"
            raise ValueError(f"{self.name!r}: column {self.source!r} is {what}: give lists of numbers or texts")
        if self.longest == 0:
            raise ValueError(f"{self.name!r}: no list has a value from {self.start} to {self.end}")
        if self.pad_to is None and self.pad_value is not None:
            raise ValueError(f"{self.name!r} has a pad_value: add pad_to")
        if self.pad_to is not None and (self.longest is None or self.longest > self.pad_to):
            fix = f'"start": 0, "end": {self.pad_to}, or "start": -{self.pad_to}'
            raise ValueError(f"{self.name!r}: lists may be longer than pad_to {self.pad_to}: bound them by {fix}")
        wanted = {"string": (str,), "int": (int,), "hex": (int,), "float": (int, float)}[source.type]
        if self.pad_value is not None and (not isinstance(self.pad_value, wanted) or isinstance(self.pad_value, bool)):
            raise ValueError(f"{self.name!r}: pad_value {self.pad_value!r} is not {source.type}")
        if isinstance(self.pad_value, int) and not (
            0 <= self.pad_value < 2**64 if source.type == "hex" else -(2**63) <= self.pad_value < 2**63
        ):
            raise ValueError(f"{self.name!r}: pad_value {self.pad_value} is not {source.type} of 64 bits")
        return [(self.name, source.type, True)]


class Join(Settings):
    """Columns of another table, found by key: NAME_COLUMN, missing where the key is not there.

    The table is read when learning, and kept with what is fitted: it has to fit in memory.

    Args:
        by: key, one column or several, of single values.
        file: the table: files, or a folder, of text or Parquet.
        input: how to read it, and its columns: those of the key, and those that are wanted.
        on: the key's columns there, in the order of `by`; default, the same names.
    """

    type: Literal["join"] = "join"
    name: str = Field(min_length=1)
    by: Names
    file: Names
    input: Input
    on: Names | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return _tuple(self.by)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key's columns in the other table."""
        return _tuple(self.by if self.on is None else self.on)

    @property
    def stored(self) -> dict[str, str]:
        """Name by which a fitted ETL holds each column of the other table: the key first."""
        return {name: f"__key{place}" for place, name in enumerate(self.keys)} | self.new_names

    @property
    def new_names(self) -> dict[str, str]:
        """New name by column of the other table."""
        names = [column.name for column in self.input.columns if column.name not in self.keys]
        return {name: f"{self.name}_{name}" for name in names}

    def made(self, find: Find) -> list[Made]:
        """The new columns; keys that do not agree, or a column of times, is a ValueError."""
        _check_keys(self.name, self.by, find)
        there = {column.name: column.staged for column in self.input.columns}
        if len(self.keys) != len(self.inputs):
            raise ValueError(f"{self.name!r}: by names {len(self.inputs)} columns, on {len(self.keys)}: name as many")
        for mine, other in zip(self.inputs, self.keys, strict=True):
            if other not in there:
                raise ValueError(f"{self.name!r}: key column {other!r} is not among the columns of its input")
            if there[other].is_list or there[other].type != find(mine).type:
                found = "a list" if there[other].is_list else there[other].type
                raise ValueError(f"{self.name!r}: column {mine!r} is {find(mine).type}, its partner {other!r} {found}")
        if self.input.hive_partitioning or self.input.file_name is not None:
            raise ValueError(f"{self.name!r}: a table to join has no columns in its path: leave them out of its input")
        if not self.new_names:
            raise ValueError(f"{self.name!r} takes no column: add the wanted ones to the columns of its input")
        made: list[Made] = []
        for name, new in self.new_names.items():
            column = there[name]
            kind = column.type
            if kind == "timestamp" or kind == "bool":  # booleans are whole numbers by now  # noqa: PLR1714
                raise ValueError(f"{self.name!r}: column {name!r} to join is a timestamp: make it a number")
            made.append((new, kind, column.is_list))
        return made


class Computed(Settings):
    """A column that a function of yours computes from whole columns, known by the name it was registered under.

    Args:
        source: columns, passed to the function in this order.
        function: name given to `viviane.etl.register_function`.
        result: type of the values that it returns.
        list: it returns a list a row.
    """

    type: Literal["function"] = "function"
    name: str = Field(min_length=1)
    source: Names
    function: str
    result: Kind = "float"
    list: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return _tuple(self.source)

    def made(self, find: Find) -> builtins.list[Made]:
        """The new column; a name that is not registered is a ValueError."""
        for name in self.inputs:
            find(name)
        if self.function not in FUNCTIONS:
            known = f"; known: {', '.join(FUNCTIONS)}" if len(FUNCTIONS) else ""
            fix = "import the module that calls viviane.etl.register_function first"
            raise ValueError(f"{self.name!r}: no function {self.function!r} is registered{known}: {fix}")
        return [(self.name, self.result, self.list)]


class _OrderedRows(Settings):
    """What derivations from other rows of the same key have in common."""

    source: str
    by: Names
    order_by: str
    shift: int = Field(default=1, ge=1)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (self.source, *_tuple(self.by), self.order_by)


class DifferenceLag(_OrderedRows):
    """x - x of an earlier row with the same key; times give seconds. Missing where there is no earlier row.

    Rows are those of one run (or table), before filters and split; a row with a missing key or time takes no part.

    Args:
        by: key, one column or several.
        order_by: earlier means smaller here; equal ones count in the order of the input.
        shift: how many rows back.
    """

    type: Literal["difference_lag"] = "difference_lag"
    name: str = Field(min_length=1)

    def made(self, find: Find) -> list[Made]:
        """The new column; a source without differences is a ValueError."""
        _check_keys(self.name, self.by, find)
        for name in (self.source, self.order_by):
            column = find(name)
            if column.is_list:
                raise ValueError(
                    f"{self.name!r}: column {name!r} is a list, and a value of a list has no earlier row of its own to "
                    "be compared with: make one number a row of it first, with a function"
                )
            if column.type not in ("int", "float", "timestamp"):
                raise ValueError(f"{self.name!r}: column {name!r} must hold one int, float or timestamp a row")
        return [(self.name, "float", False)]


class Neighbour(_OrderedRows):
    """The value of an earlier ("lag") or later ("lead") row with the same key; missing where there is none.

    Rows are those of one run (or table), before filters and split; a row with a missing key or time takes no part.

    Args:
        source: column of numbers or text whose value is taken; it may be missing there.
        by: key, one column or several.
        order_by: earlier means smaller here; equal ones count in the order of the input.
        shift: how many rows away.
    """

    type: Literal["lag", "lead"]
    name: str = Field(min_length=1)

    def made(self, find: Find) -> list[Made]:
        """The new column; a list, or a time to take, is a ValueError."""
        _check_keys(self.name, self.by, find)
        source, order = find(self.source), find(self.order_by)
        if source.is_list or source.type == "timestamp":
            raise ValueError(
                f"{self.name!r}: column {self.source!r} must hold one number or text a row; of times there is "
                "difference_lag"
            )
        if order.is_list or order.type not in ("int", "float", "timestamp"):
            raise ValueError(f"{self.name!r}: column {self.order_by!r} must hold one int, float or timestamp a row")
        return [(self.name, source.type, False)]


class History(Settings):
    """The last values of the key's earlier rows: a list, oldest first, empty where there is none.

    Earlier means strictly smaller in `order_by`, so that rows of one moment do not see each other. Rows are those of
    one run (or table), before filters and split; missing values are passed over, and a row with a missing key or time
    takes no part.

    Args:
        source: column whose values are listed; a label's too, since only earlier rows show theirs.
        by: key, one column or several.
        last: longest list.
        where: list only rows that satisfy it, such as those that were clicked.
    """

    type: Literal["history"] = "history"
    name: str = Field(min_length=1)
    source: str
    by: Names
    order_by: str
    last: int = Field(ge=1, le=100_000)
    where: Filter | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns of the key."""
        return _tuple(self.by)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        where = (self.where.column,) if self.where else ()
        return (self.source, *_tuple(self.by), self.order_by, *where)

    def made(self, find: Find) -> list[Made]:
        """The new column; a source that cannot be listed is a ValueError."""
        _check_keys(self.name, self.by, find)
        source, order = find(self.source), find(self.order_by)
        if source.is_list or source.type == "timestamp":
            raise ValueError(f"{self.name!r}: column {self.source!r} must hold one number or text a row")
        if order.is_list or order.type not in ("int", "float", "timestamp"):
            raise ValueError(f"{self.name!r}: column {self.order_by!r} must hold one int, float or timestamp a row")
        if self.where is not None and find(self.where.column).is_list:
            raise ValueError(f"{self.name!r}: the column of where, {self.where.column!r}, is a list")
        return [(self.name, source.type, True)]


class CountEncode(Settings):
    """How many training rows have the row's key; 0 for a key that was never seen or is missing.

    Where a column of the key is a list, here and in the other derivations by key, each value of a list counts as a row
    of its own when learning, and a row takes the mean over its values; an empty list is like a missing key.
    """

    type: Literal["count"] = "count"
    name: str = Field(min_length=1)
    by: Names

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return _tuple(self.by)

    def made(self, find: Find) -> list[Made]:
        """The new column."""
        _check_keys(self.name, self.by, find, lists=True)
        return [(self.name, "float", False)]


class GroupStatistics(Settings):
    """Statistics of values over the training rows of the row's key: columns NAME_OF_STATISTIC.

    Missing values are passed over; std and var are those of the population, and the median of an even count is the
    mean of the middle two. nunique, the number of distinct values, is exact and takes any type; the others take
    numbers, as float64. An unseen or missing key has count, sum and nunique 0, the others missing.

    Args:
        by: key, one column or several, of which one may be a list.
        of: columns; each value of a list counts, where the key is none.
    """

    type: Literal["group_statistics"] = "group_statistics"
    name: str = Field(min_length=1)
    by: Names
    of: Names
    statistics: tuple[Statistic, ...] = Field(default=("mean",), min_length=1)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from."""
        return (*_tuple(self.by), *_tuple(self.of))

    def made(self, find: Find) -> list[Made]:
        """The new columns; a statistic named twice, or one that the type has not, is a ValueError."""
        _check_keys(self.name, self.by, find, lists=True)
        if len(set(self.statistics)) < len(self.statistics):
            raise ValueError(f"{self.name!r} names a statistic twice")
        for name in _tuple(self.of):
            column = find(name)
            if column.type not in ("int", "float") and set(self.statistics) != {"nunique"}:
                raise ValueError(
                    f"{self.name!r}: column {name!r} is of type {column.type}: {', '.join(self.statistics)} of it are "
                    'undefined: give int or float, or "nunique" in a derivation of its own'
                )
            if column.is_list and any(find(key).is_list for key in _tuple(self.by)):
                raise ValueError(
                    f"{self.name!r}: the key and column {name!r} are both lists, and which value belongs to which key "
                    "is undefined: give a key of single values, or one number a row"
                )
        return [(f"{self.name}_{of}_{one}", "float", False) for of in _tuple(self.of) for one in self.statistics]


class TargetEncode(Settings):
    """(sum of the target + smoothing prior) / (count + smoothing), over the training rows of the row's key.

    A training row takes both sums and the prior from the other folds, so its own label has no part in its value; all
    other rows take them from all training rows. An unseen or missing key has the prior, the mean of the target (0
    where no other fold has a row).

    Args:
        by: key, one column or several, of which one may be a list.
        target: name of a label; of several, which give columns NAME_TARGET.
        folds: number of folds.
        fold_by: column whose hash gives the fold, so that equal values share one; default, the number of the row.
        seed: another one gives other folds.
        smoothing: weight of the prior, in rows.
        prior: in place of the mean.
    """

    type: Literal["target_encode"] = "target_encode"
    name: str = Field(min_length=1)
    by: Names
    target: Names
    folds: int = Field(default=5, ge=2, le=100)
    fold_by: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    smoothing: float = Field(default=20.0, ge=0)
    prior: float | None = None

    @model_validator(mode="after")
    def _check(self) -> TargetEncode:
        if len(set(_tuple(self.target))) < len(_tuple(self.target)):
            raise ValueError(f"{self.name!r} names a target twice")
        return self

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it is made from when it is applied; targets and folds are for training rows only."""
        return _tuple(self.by)

    @property
    def targets(self) -> dict[str, str]:
        """Label by derived column."""
        if isinstance(self.target, str):
            return {self.name: self.target}
        return {f"{self.name}_{label}": label for label in self.target}

    def made(self, find: Find) -> list[Made]:
        """The new columns."""
        _check_keys(self.name, self.by, find, lists=True)
        return [(name, "float", False) for name in self.targets]


RowDerivation: TypeAlias = ValueMap | DatePart | MissingIndicator | ListSlice | Join | Computed
Earlier: TypeAlias = DifferenceLag | Neighbour | History
GroupDerivation: TypeAlias = CountEncode | GroupStatistics | TargetEncode
Derivation: TypeAlias = Annotated[RowDerivation | Earlier | GroupDerivation, Field(discriminator="type")]

ELEMENTWISE: Final[Any] = (ValueMap, DatePart, MissingIndicator)
"""Those whose lists are as long as the lists that they are made from."""
ROW_DERIVATIONS: Final[Any] = (ValueMap, DatePart, MissingIndicator, ListSlice, Join, Computed)
EARLIER: Final[Any] = (DifferenceLag, Neighbour, History)
"""Those whose value depends on other rows of the run."""


def key_names(by: Names) -> tuple[str, ...]:
    """The columns of a key."""
    return _tuple(by)


def _tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _check_keys(name: str, by: Names, find: Find, *, lists: bool = False) -> None:
    columns = [find(one) for one in _tuple(by)]
    if len(set(_tuple(by))) < len(_tuple(by)):
        raise ValueError(f"{name!r} names a column of its key twice")
    for column in columns:
        if (column.is_list and not lists) or column.type not in ("string", "int", "hex"):
            what = f"of type {column.type}" if lists or not column.is_list else "a list, so a row has several keys"
            raise ValueError(f"{name!r}: key column {column.name!r} is {what}: give single string, int or hex values")
    if sum(column.is_list for column in columns) > 1:
        raise ValueError(f"{name!r}: several columns of the key are lists: only one can be")
