"""What the data is: columns, cardinalities and reserved ids, written once by the ETL and read by all.

A schema travels as `schema.json` inside every data set and every saved model, so that no one has to type a
cardinality twice. Three ids are reserved in every categorical column but those of raw ids, the same in cleaning,
training and prediction:

    0  padding   fills sequences to a fixed length; never counts in pooling
    1  missing   the value was absent
    2  unknown   the value was rarer than the frequency threshold, or unseen when the ETL was fitted
    3  the first id of a value that was seen
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from pydantic import Field, model_validator

from viviane.config.base import Settings
from viviane.core.errors import SchemaError, SchemaNotFoundError, suggest
from viviane.core.files import write_json_atomic
from viviane.core.html import html_table
from viviane.core.locations import AnyPath, location
from viviane.core.remote.published import published_location

SCHEMA_FILE: Final = "schema.json"
SCHEMA_VERSION: Final = 1
MOST_IN_A_LIST: Final = 2**31 - 1
"""Elements of a list in one row: Arrow counts them with 32 bits."""
MOST_IDS: Final = 2**63 - 1
"""Size of a range of ids, which are signed and have 64 bits at most."""


class ReservedIds(Settings):
    """Ids with a fixed meaning in every categorical column that has num_ids."""

    padding: Literal[0] = 0
    missing: Literal[1] = 1
    unknown: Literal[2] = 2
    first: Literal[3] = 3


RESERVED: Final = ReservedIds()


class LabelColumn(Settings):
    """What is to be predicted: a column of 0 and 1, or of real numbers.

    Args:
        name: the Parquet column.
        task: "binary" for 0/1 labels (checked by the reader), "regression" for real numbers.
        dtype: physical type in Parquet.
        optional: a binary label may be -1, which means that the row has none: it counts neither in the loss nor in
            the metrics of this label.
    """

    name: str = Field(min_length=1)
    task: Literal["binary", "regression"] = "binary"
    dtype: Literal["float32", "int8", "int32", "int64", "bool"] = "float32"
    optional: bool = False

    @model_validator(mode="after")
    def _check(self) -> LabelColumn:
        if self.optional and (self.task != "binary" or self.dtype == "bool"):
            raise ValueError(f"label {self.name!r}: optional is for binary labels of a type that can hold -1")
        return self


class DenseColumn(Settings):
    """Real numbers: one a row (dim 1, a scalar column) or a vector (a list column of fixed length dim)."""

    name: str = Field(min_length=1)
    dim: int = Field(default=1, ge=1, le=MOST_IN_A_LIST)
    dtype: Literal["float32"] = "float32"


class CategoricalColumn(Settings):
    """Ids of an embedding table: 0 <= id < num_ids, or any whole number of 64 bits.

    Args:
        name: the Parquet column.
        num_ids: size of the id range, the reserved ids included; the table's number of rows. None: raw ids, each one
            ordinary, 0 and negative ones too; none is reserved, and the table is dynamic.
        kind: "one_hot", one id a row (a scalar column); "multi_hot", a bag of ids in no order, empty bags
            allowed (a list column); "sequence", ids in order, padded or cut to max_length when batched.
        max_length: longest bag or sequence; required for a sequence. A longer one is an error, not cut.
        hotness: ids that every row has, where that is one number; a bag or sequence of another length is an error.
            Ranks then need not exchange their numbers of ids.
        weights: name of a list<float32> column with one weight per id of a multi-hot column.
        vocabulary: columns that name the same vocabulary share ids, and by default a table.
        dtype: physical type in Parquet; raw ids are int64 unless it is given.
    """

    name: str = Field(min_length=1)
    num_ids: int | None = Field(ge=1, le=MOST_IDS)
    kind: Literal["one_hot", "multi_hot", "sequence"] = "one_hot"
    max_length: int | None = Field(default=None, ge=1, le=MOST_IN_A_LIST)
    hotness: int | None = Field(default=None, ge=1, le=MOST_IN_A_LIST)
    weights: str | None = None
    vocabulary: str | None = None
    dtype: Literal["int32", "int64"] = "int32"

    @model_validator(mode="after")
    def _check(self) -> CategoricalColumn:
        if self.kind == "sequence" and self.max_length is None:
            raise ValueError(f"the sequence column {self.name!r} needs max_length")
        if self.kind == "one_hot" and (self.max_length is not None or self.weights is not None):
            raise ValueError(f"the one-hot column {self.name!r} takes neither max_length nor weights")
        if self.hotness is not None and (self.kind == "one_hot" or self.hotness > (self.max_length or self.hotness)):
            raise ValueError(f"column {self.name!r}: hotness is for bags and sequences, and at most max_length")
        if self.kind == "sequence" and self.weights is not None:
            raise ValueError(f"the sequence column {self.name!r} takes no weights; make it multi_hot")
        if self.num_ids is None and "dtype" not in self.model_fields_set:
            object.__setattr__(self, "dtype", "int64")
        if self.dtype == "int32" and (self.num_ids or 0) > 2**31:
            raise ValueError(f"column {self.name!r}: {self.num_ids} ids do not fit int32; set dtype to int64")
        return self

    @property
    def id_range(self) -> int:
        """num_ids, where they have to be known.

        Raises:
            SchemaError: the column holds raw ids.
        """
        if self.num_ids is None:
            raise SchemaError("raw ids have no range, and one is needed here", value=self.name, fix="give it num_ids")
        return self.num_ids

    @property
    def table(self) -> str:
        """The table the column looks up by default: its vocabulary's, else its own."""
        return self.vocabulary or self.name


Column: TypeAlias = LabelColumn | DenseColumn | CategoricalColumn


class Schema(Settings):
    """The columns of a data set, in the order in which they are stacked into a batch.

    Args:
        labels, dense, categorical: the columns.
        sample_weight: name of a float32 column with a weight per row in the loss and the metrics.
        ignored: columns that may be in the files and are not read (ids, times).
        reserved: the reserved ids.

    Example:
        >>> schema = Schema(labels=[{"name": "click"}], categorical=[{"name": "item", "num_ids": 100}])
        >>> schema.column("item").num_ids
        100
    """

    version: Literal[1] = SCHEMA_VERSION
    labels: tuple[LabelColumn, ...] = ()
    dense: tuple[DenseColumn, ...] = ()
    categorical: tuple[CategoricalColumn, ...] = ()
    sample_weight: str | None = None
    ignored: tuple[str, ...] = ()
    reserved: ReservedIds = RESERVED

    @model_validator(mode="after")
    def _check(self) -> Schema:
        names = self.column_names + list(self.ignored)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"column name(s) used twice: {', '.join(twice)}")
        if not self.dense and not self.categorical:
            raise ValueError("a schema needs at least one dense or categorical column")
        sizes: dict[str, int | None] = {}
        for column in self.categorical:
            if sizes.setdefault(column.table, column.num_ids) != column.num_ids:
                raise ValueError(f"columns of vocabulary {column.table!r} differ in num_ids")
        return self

    @property
    def columns(self) -> tuple[Column, ...]:
        """Labels, dense and categorical columns, in order."""
        return self.labels + self.dense + self.categorical

    @property
    def column_names(self) -> list[str]:
        """Every column that is read, weights included, in order."""
        names = [column.name for column in self.columns]
        names += [column.weights for column in self.categorical if column.weights is not None]
        return names + ([self.sample_weight] if self.sample_weight else [])

    @cached_property
    def _by_name(self) -> dict[str, Column]:
        return {column.name: column for column in self.columns}

    def column(self, name: str) -> Column:
        """Return one column.

        Raises:
            SchemaError: with the nearest name.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise SchemaError("no such column in the schema", value=name, fix=suggest(name, self._by_name)) from None

    def categorical_column(self, name: str) -> CategoricalColumn:
        """Return one categorical column, or raise if it is of another kind."""
        column = self.column(name)
        if not isinstance(column, CategoricalColumn):
            known = ", ".join(one.name for one in self.categorical)
            raise SchemaError("the column is not categorical", value=name, allowed=known)
        return column

    @property
    def one_hot(self) -> tuple[CategoricalColumn, ...]:
        """Categorical columns with one id a row."""
        return tuple(column for column in self.categorical if column.kind == "one_hot")

    @property
    def bags(self) -> tuple[CategoricalColumn, ...]:
        """Categorical columns with any number of ids a row: multi-hot and sequences."""
        return tuple(column for column in self.categorical if column.kind != "one_hot")

    @property
    def num_dense(self) -> int:
        """Width of the stacked dense columns."""
        return sum(column.dim for column in self.dense)

    def select(self, names: Iterable[str]) -> Schema:
        """Return a schema with only the named columns; the others become ignored."""
        wanted = set(names)
        for name in wanted:
            self.column(name)
        kept = {
            kind: tuple(column for column in getattr(self, kind) if column.name in wanted)
            for kind in ("labels", "dense", "categorical")
        }
        left = set(Schema(**kept, sample_weight=self.sample_weight).column_names)
        dropped = tuple(name for name in self.column_names if name not in left)
        return Schema(**kept, sample_weight=self.sample_weight, ignored=self.ignored + dropped)

    def save(self, path: str | AnyPath) -> AnyPath:
        """Write the schema to a file, or as schema.json into a folder; returns the file."""
        file = location(path)
        file = file if file.suffix == ".json" else file / SCHEMA_FILE
        write_json_atomic(file, self.to_dict())
        return file

    @classmethod
    def load(cls, path: str | AnyPath) -> Schema:
        """Read a schema from a file, or from schema.json in a folder."""
        file = published_location(path)
        file = file / SCHEMA_FILE if file.is_dir() else file
        if not file.exists():
            raise SchemaNotFoundError("no schema here", where=str(file), fix="write the data set with `viviane etl`")
        return cls.from_json_file(file)

    def _repr_html_(self) -> str:
        """Return the columns as a table, for notebooks."""
        rows: list[list[Any]] = [[one.name, "label", one.task, one.dtype, None] for one in self.labels]
        rows += [
            [one.name, "dense", f"{one.dim} numbers" if one.dim > 1 else "", one.dtype, None] for one in self.dense
        ]
        for one in self.categorical:
            kind = one.kind if one.max_length is None else f"{one.kind}, up to {one.max_length}"
            rows.append([one.name, "categorical", kind, one.dtype, "raw ids" if one.num_ids is None else one.num_ids])
        if self.sample_weight is not None:
            rows.append([self.sample_weight, "weight", "", "float32", None])
        return html_table("Schema", ["column", "role", "kind", "type", "ids"], rows)

    def difference(self, other: Schema) -> list[str]:
        """Return, one line each, how `other` differs from this schema in what a model depends on."""
        lines: list[str] = []
        mine: dict[str, Any] = {name: column.to_dict() for name, column in self._by_name.items()}
        theirs: dict[str, Any] = {name: column.to_dict() for name, column in other._by_name.items()}
        for name in mine.keys() | theirs.keys():
            if name not in theirs:
                lines.append(f"column {name!r} is missing")
            elif name not in mine:
                lines.append(f"column {name!r} is new")
            else:
                for key in mine[name].keys() | theirs[name].keys():
                    a, b = mine[name].get(key), theirs[name].get(key)
                    if a != b:
                        lines.append(f"column {name!r}: {key} is {b!r}, was {a!r}")
        return sorted(lines)
