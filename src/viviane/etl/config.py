"""The declarative file: what the raw files hold, and what becomes of it."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from viviane.config.base import Settings
from viviane.core.errors import suggest
from viviane.etl.conditions import Filter
from viviane.etl.config_checks import check_categorical, check_derived, check_number, check_shared
from viviane.etl.derivations import ELEMENTWISE, ROW_DERIVATIONS, Derivation, TargetEncode
from viviane.etl.operators import Operator
from viviane.etl.saved import without

RESERVED_PREFIX = "__"  # columns that staging adds


class InputColumn(Settings):
    """One column of the raw files.

    Args:
        name: its name, in the header or by position.
        type: "hex" is a whole number written with 1 to 16 hexadecimal digits; a missing or NaN float is missing.
        list: the column is a Parquet list.
        separator: the column is text that holds a list, such as "Comedy|Drama".
    """

    name: str = Field(min_length=1)
    type: Literal["float", "int", "string", "hex", "timestamp"] = "string"
    list: bool = False
    separator: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _check(self) -> InputColumn:
        if self.name.startswith(RESERVED_PREFIX):
            raise ValueError(f"column names must not begin with {RESERVED_PREFIX!r}: {self.name!r}")
        return self

    @property
    def is_list(self) -> bool:
        """Whether a row holds several values."""
        return self.list or self.separator is not None

    @property
    def is_number(self) -> bool:
        """Whether operators on numbers apply."""
        return self.type in ("float", "int")


class Input(Settings):
    """How to read the raw files; Parquet is recognised by its first bytes and needs only `columns`.

    Args:
        columns: for text without header, every column in order; otherwise those that are used.
        delimiter: between values of a text line; several characters are allowed where quote is None.
        header: the first line of each text file holds the names.
        quote: character around values that contain the delimiter; None where quotes mean nothing.
        encoding: of text files.
        missing: texts that stand for a missing value, in string columns of Parquet too.
        hive_partitioning: columns are also taken from folders called `name=value`, which are searched. False: the name
            of a folder means nothing.
    """

    columns: tuple[InputColumn, ...] = Field(min_length=1)
    delimiter: str = Field(default=",", min_length=1)
    header: bool = True
    quote: str | None = Field(default=None, min_length=1, max_length=1)
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ("",)
    hive_partitioning: bool = False

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "hive_partitioning")

    @model_validator(mode="after")
    def _check(self) -> Input:
        _once([column.name for column in self.columns], "input column")
        if len(self.delimiter) > 1 and self.quote is not None:
            raise ValueError("a delimiter of several characters cannot be combined with quote")
        try:
            plain = "a\n\t".encode(self.encoding) == b"a\n\t"
        except LookupError:
            raise ValueError(f"unknown encoding {self.encoding!r}") from None
        if not plain:
            raise ValueError(f"encoding {self.encoding!r} does not keep ASCII as it is; convert the files to UTF-8")
        return self


class LabelSpec(Settings):
    """A label: a number, perhaps through operators such as threshold. A row without it is malformed.

    Args:
        optional: a row may lack it, a binary label; it is then -1, which counts neither in loss nor in metrics.
    """

    name: str = Field(min_length=1)
    source: str | None = None
    task: Literal["binary", "regression"] = "binary"
    operators: tuple[Operator, ...] = ()
    optional: bool = False

    @model_validator(mode="after")
    def _check(self) -> LabelSpec:
        if self.optional and self.task != "binary":
            raise ValueError(f"label {self.name!r}: only binary labels are optional; filter the rows without it")
        return self

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "optional")


class DenseSpec(Settings):
    """A real number, or a vector of `dim` numbers from a list column; operators apply to every element."""

    name: str = Field(min_length=1)
    source: str | None = None
    dim: int = Field(default=1, ge=1)
    operators: tuple[Operator, ...] = ()


class Categorify(Settings):
    """Number the values seen in training: 3, 4, ... by falling count, ties by value.

    Args:
        min_count: a value seen fewer times becomes the unknown id.
        max_values: keep only so many of the most frequent.
        unknown_buckets: so many ids after the last value take rare and unseen values, by hash; 0: all are id 2.
    """

    type: Literal["categorify"] = "categorify"
    min_count: int = Field(default=1, ge=1)
    max_values: int | None = Field(default=None, ge=1)
    unknown_buckets: int = Field(default=0, ge=0, le=2**30)

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "unknown_buckets")


class HashTo(Settings):
    """3 + h mod (num_ids - 3), h the first 60 bits of the MD5 of the value's text: nothing is learned or stored."""

    type: Literal["hash"] = "hash"
    num_ids: int = Field(ge=4)


class Bucketize(Settings):
    """3 + the number of borders <= x; borders are given, or cut the training data into equal shares.

    Args:
        borders: rising numbers.
        quantiles: number of shares; equal borders fall together, so there may be fewer buckets.
    """

    type: Literal["bucketize"] = "bucketize"
    borders: tuple[float, ...] | None = Field(default=None, min_length=1, max_length=1000)
    quantiles: int | None = Field(default=None, ge=2, le=1000)

    @model_validator(mode="after")
    def _check(self) -> Bucketize:
        if (self.borders is None) == (self.quantiles is None):
            raise ValueError("bucketize takes either borders or quantiles")
        if self.borders is not None and any(a >= b for a, b in pairwise(self.borders)):
            raise ValueError("borders must rise")
        return self


class RawIds(Settings):
    """The whole number itself, or the first 60 bits of the MD5 of a text or cross: nothing is learned or reserved.

    A dynamic table takes such ids. Hexadecimal numbers of 16 digits above 2^63 - 1 become negative.

    Args:
        missing: the id of a missing value; None refuses missing values.
    """

    type: Literal["raw"] = "raw"
    missing: int | None = Field(default=None, ge=-(2**63), lt=2**63)


Encoding: TypeAlias = Annotated[Categorify | HashTo | Bucketize | RawIds, Field(discriminator="type")]


class CategoricalSpec(Settings):
    """A column of ids.

    Args:
        source: the raw column; several names make a cross, whose value is the tuple of theirs. Lists are crossed value
            by value: single values stand beside each of them, and several lists of a row have one length.
        encoding: how values become ids.
        operators: applied first; for columns of numbers.
        kind: "multi_hot" and "sequence" need a list column.
        max_length: longer lists are cut (and counted); required for a sequence.
        keep: which end of a list survives the cut.
        hotness: values that every list has, after the cut; another length is a malformed row, and a missing list is so
            many missing values. "auto" looks at all rows of the run and keeps the length if it is one.
        weights: raw list column with one weight per value; kept under its own name.
        vocabulary: columns that name the same vocabulary share values and ids.
    """

    name: str = Field(min_length=1)
    source: str | tuple[str, ...] | None = None
    encoding: Encoding = Categorify()
    operators: tuple[Operator, ...] = ()
    kind: Literal["one_hot", "multi_hot", "sequence"] = "one_hot"
    max_length: int | None = Field(default=None, ge=1)
    keep: Literal["first", "last"] = "last"
    hotness: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    weights: str | None = None
    vocabulary: str | None = None
    dtype: Literal["int32", "int64"] = "int32"

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "hotness")

    @model_validator(mode="after")
    def _check(self) -> CategoricalSpec:
        if self.kind == "sequence" and self.max_length is None:
            raise ValueError(f"the sequence {self.name!r} needs max_length")
        if self.kind == "one_hot" and (self.max_length or self.weights or self.hotness):
            raise ValueError(f"the one-hot column {self.name!r} takes neither max_length nor hotness nor weights")
        if isinstance(self.hotness, int) and self.max_length is not None and self.hotness > self.max_length:
            raise ValueError(f"{self.name!r} has hotness {self.hotness} above max_length {self.max_length}")
        if self.kind == "sequence" and self.weights:
            raise ValueError(f"the sequence {self.name!r} takes no weights")
        if len(self.sources) > 1 and (self.operators or self.encoding.type == "bucketize"):
            raise ValueError(
                f"the cross {self.name!r} is a tuple, which operators and bucketize do not compute with: leave out its "
                "operators, and encode it with categorify, hash or raw"
            )
        if self.encoding.type == "raw":
            if "dtype" in self.model_fields_set and self.dtype != "int64":
                raise ValueError(f"the raw ids of {self.name!r} are int64")
            object.__setattr__(self, "dtype", "int64")
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The raw columns, in order."""
        if self.source is None:
            return (self.name,)
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def table(self) -> str:
        """The vocabulary's name."""
        return self.vocabulary or self.name


class EtlConfig(Settings):
    """Everything `viviane etl` does to raw files, but where they are.

    Example:
        >>> config = EtlConfig(
        ...     input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        ...     labels=[{"name": "click"}], categorical=[{"name": "item"}])
        >>> config.categorical[0].encoding.type
        'categorify'
    """

    format: Literal["viviane-etl"] = "viviane-etl"
    version: Literal[1] = 1
    input: Input
    derived: tuple[Derivation, ...] = ()
    labels: tuple[LabelSpec, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    categorical: tuple[CategoricalSpec, ...] = ()
    sample_weight: DenseSpec | None = None
    ignored: tuple[str, ...] = ()
    filters: tuple[Filter, ...] = ()

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "derived")

    def column(self, name: str) -> InputColumn:
        """Return a raw or derived column."""
        for column in (*self.input.columns, *self.derived_columns.values()):
            if column.name == name:
                return column
        raise ValueError(_no_column(name, [*self.input.columns, *self.derived_columns.values()]))

    @cached_property
    def derived_columns(self) -> dict[str, InputColumn]:
        """Columns that derivations make, by name: from raw ones and from what earlier row derivations made."""
        known = {column.name: column for column in self.input.columns}
        made: dict[str, InputColumn] = {}

        def find(name: str) -> InputColumn:
            if name not in known:
                raise ValueError(_no_column(name, list(known.values())))
            return known[name]

        # Stable: row derivations come first, in their order.
        for one in sorted(self.derived, key=lambda one: not isinstance(one, ROW_DERIVATIONS)):
            for name, kind, is_list in one.made(find):
                if name in known or name in made:
                    raise ValueError(f"the derived column {name!r} stands twice, or is a raw one: rename it")
                made[name] = InputColumn(name=name, type=kind, list=is_list)
                known |= {name: made[name]} if isinstance(one, ROW_DERIVATIONS) else {}
        return made

    def _raw(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.derived_columns]

    def lists_of(self, spec: CategoricalSpec) -> tuple[str, ...]:
        """Those of a categorical column's sources that are lists."""
        return tuple(name for name in spec.sources if self.column(name).is_list)

    def list_root(self, name: str) -> str | None:
        """The raw column whose lists are as long, row by row, as those of a list column; None if no raw column is."""
        sources = {one.name: one.source for one in self.derived if isinstance(one, ELEMENTWISE)}
        while name in sources:
            name = sources[name]
        return None if name in self.derived_columns else name

    @property
    def label_sources(self) -> frozenset[str]:
        """Raw columns that only labels need: they may be absent when predicting."""
        return frozenset(spec.source or spec.name for spec in self.labels) - frozenset(self.feature_sources)

    @property
    def feature_sources(self) -> tuple[str, ...]:
        """Raw columns that features need, each once."""
        names = [spec.source or spec.name for spec in self.dense]
        for spec in self.categorical:
            names += [*spec.sources, *([spec.weights] if spec.weights else [])]
        names += [name for one in self.derived for name in one.inputs]
        return tuple(dict.fromkeys(self._raw(names)))

    @property
    def fold_sources(self) -> frozenset[str]:
        """Raw columns that only the folds of training rows need."""
        return frozenset(one.fold_by for one in self.derived if isinstance(one, TargetEncode) and one.fold_by)

    @property
    def used(self) -> tuple[InputColumn, ...]:
        """Raw columns that anything needs, in the order of the input."""
        wanted = {*self.feature_sources, *self.label_sources, *self.ignored, *(one.column for one in self.filters)}
        wanted |= {self.sample_weight.source or self.sample_weight.name} if self.sample_weight else set()
        return tuple(column for column in self.input.columns if column.name in wanted)

    @model_validator(mode="after")
    def _check(self) -> EtlConfig:
        specs: list[Any] = [*self.labels, *self.dense, *self.categorical]
        specs += [self.sample_weight] if self.sample_weight else []
        weights = [spec.weights for spec in self.categorical if spec.weights]
        _once([spec.name for spec in specs] + weights + list(self.ignored), "output column")
        _once([one.name for one in self.derived], "derivation")
        if not self.dense and not self.categorical:
            raise ValueError("nothing to write: give dense or categorical columns")
        numbers: list[LabelSpec | DenseSpec] = [*self.labels, *self.dense]
        for number in numbers + ([self.sample_weight] if self.sample_weight else []):
            check_number(number, self.column(number.source or number.name))
        for spec in self.categorical:
            check_categorical(spec, self)
        for name in [*self.ignored, *(one.column for one in self.filters)]:
            self.column(name)
        check_shared(self)
        check_derived(self)
        return self


def _no_column(name: str, known: list[InputColumn]) -> str:
    return f"no input column {name!r}; {suggest(name, [column.name for column in known])}"


def _once(names: list[str], what: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} named twice: {', '.join(twice)}")
