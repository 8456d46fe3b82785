"""Which part of the output a row belongs to: by hash of a column, by time, by file, by place in the input.

Every split comes down to one whole number per row, staged as a column, and borders between the parts: a row belongs
to the part whose range holds its number.
"""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.core.digits import number_in
from viviane.core.errors import ConfigError
from viviane.core.locations import AnyPath
from viviane.etl.config import EtlConfig
from viviane.etl.expressions import HASH_BITS

KEY: Final = "__part"
_NAME: Final = r"^[A-Za-z0-9_-]+$"
_FORMS: Final = (
    "hash:COLUMN:NAME=SHARE,...  time:COLUMN:NAME=SHARE,...  time:COLUMN:NAME@START,...  "
    "file:NAME=PATTERN,...  rows:NAME=SHARE,..."
)
PartName: TypeAlias = Annotated[str, Field(pattern=_NAME)]


class _Fractions(Settings):
    parts: dict[PartName, float] | None = None

    @model_validator(mode="after")
    def _check_sum(self) -> _Fractions:
        values = list((self.parts or {}).values())
        if values and (any(value <= 0 for value in values) or abs(sum(values) - 1) > 1e-9):
            raise ValueError(f"the shares must be above 0 and sum to 1, not {sum(values):g}")
        return self


class HashSplit(_Fractions):
    """By a hash of a column: all rows of one user, say, land in one part. Shares hold in expectation."""

    type: Literal["hash"] = "hash"
    column: str
    parts: dict[PartName, float] = Field(min_length=1)


class TimeSplit(_Fractions):
    """By a column of times or whole numbers: earlier rows in earlier parts, equal times together.

    Args:
        parts: shares of the rows, in order of time; or
        starts: the value at which each part but the first (named `first`) begins.
    """

    type: Literal["time"] = "time"
    column: str
    parts: dict[PartName, float] | None = None
    first: PartName = "train"
    starts: dict[PartName, int | str] | None = None

    @model_validator(mode="after")
    def _check(self) -> TimeSplit:
        if (self.parts is None) == (self.starts is None) or not (self.parts or self.starts):
            raise ValueError("a time split takes either shares (train=0.9,test=0.1) or starts (test@2014-06-01)")
        if self.starts and self.first in self.starts:
            raise ValueError(f"part {self.first!r} is the rows before the first start; it takes none itself")
        return self


class FileSplit(Settings):
    """By the name of the file, or the end of its path: patterns such as day_2*."""

    type: Literal["file"] = "file"
    parts: dict[PartName, tuple[str, ...]] = Field(min_length=1)


class RowSplit(_Fractions):
    """By place in the input: the first share of the rows, then the next; for files that are in order of time."""

    type: Literal["rows"] = "rows"
    parts: dict[PartName, float] = Field(min_length=1)


Split: TypeAlias = Annotated[HashSplit | TimeSplit | FileSplit | RowSplit, Field(discriminator="type")]


def parse_split(text: str) -> HashSplit | TimeSplit | FileSplit | RowSplit:
    """Read a split from one line.

        hash:COLUMN:train=0.8,valid=0.1,test=0.1
        time:COLUMN:train=0.9,test=0.1      time:COLUMN:valid@2014-05-01,test@2014-06-01
        file:train=day_0*,train=day_1,test=day_23
        rows:train=0.9,test=0.1

    Raises:
        ConfigError: it is none of these.

    Example:
        >>> parse_split("rows:train=0.75,test=0.25").parts
        {'train': 0.75, 'test': 0.25}
    """
    kind, _, rest = text.partition(":")
    data: dict[str, Any] = {"type": kind}
    if kind in ("hash", "time"):
        data["column"], _, rest = rest.rpartition(":") if "@" not in rest else rest.partition(":")
    pairs = [part for part in rest.split(",") if part]
    sign = "@" if kind == "time" and all("@" in pair for pair in pairs) else "="
    if kind not in ("hash", "time", "file", "rows") or not pairs or not all(sign in pair for pair in pairs):
        raise ConfigError("not a split", value=text, allowed=_FORMS)
    items = [pair.split(sign, 1) for pair in pairs]
    if kind == "file":
        data["parts"] = {name: tuple(value for key, value in items if key == name) for name, _ in items}
        return FileSplit.from_dict(data, where="split")
    if len({name for name, _ in items}) != len(items):
        raise ConfigError("a split names a part twice", value=text)
    if sign == "@":
        data["starts"] = {name: _number_or_text(value) for name, value in items}
    else:
        data["parts"] = dict(items)
    kinds: dict[str, type[HashSplit | TimeSplit | RowSplit]] = {"hash": HashSplit, "time": TimeSplit, "rows": RowSplit}
    return kinds[kind].from_dict(data, where="split")


def _number_or_text(value: str) -> int | str:
    number = number_in(value.removeprefix("-"))
    if number is None:
        return value
    return -number if value.startswith("-") else number


def part_names(split: Split | None, default: str) -> list[str]:
    """The parts' names, in order."""
    if split is None:
        return [default]
    if isinstance(split, TimeSplit) and split.starts:
        return [split.first, *split.starts]
    return list(split.parts or {})


def check_split(split: Split | None, config: EtlConfig) -> None:
    """Refuse a split by a column that the config does not have or that has no order.

    Raises:
        ConfigError: naming the column.
    """
    if not isinstance(split, (HashSplit, TimeSplit)):
        return
    known = {column.name: column for column in config.input.columns}
    column = known.get(split.column)
    if column is None or column.is_list:
        raise ConfigError("the split needs a single-valued input column", value=split.column, allowed=", ".join(known))
    if isinstance(split, TimeSplit) and column.type not in ("int", "timestamp"):
        raise ConfigError(
            "a time split needs a column of type int or timestamp", where=f"column {split.column!r}", value=column.type
        )


def part_of_file(split: FileSplit, path: AnyPath) -> int:
    """The position of the part that a file belongs to.

    Raises:
        ConfigError: no part's pattern fits, or several parts' do.
    """
    fitting = [
        number
        for number, patterns in enumerate(split.parts.values())
        if any(fnmatch(path.name, pattern) or fnmatch(str(path), f"*/{pattern}") for pattern in patterns)
    ]
    if len(fitting) != 1:
        names = list(split.parts)
        found = ", ".join(names[number] for number in fitting) or "none"
        raise ConfigError("a file must fit exactly one part of the split", where=str(path), value=found)
    return fitting[0]


def cumulative(parts: dict[str, float]) -> list[float]:
    """Borders between shares, the last one (1) left out."""
    return list(accumulate(parts.values()))[:-1]


def share_borders(split: HashSplit | RowSplit, total: int | None = None) -> list[int]:
    """Borders between the parts, for hashes of 60 bits or for row numbers below `total`."""
    span = 1 << HASH_BITS if total is None else total
    return [round(border * span) for border in cumulative(split.parts)]
