"""Columns of the raw files, and the columns that an ETL writes: their settings one by one."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from viviane.config.base import Settings
from viviane.etl.operators import Operator
from viviane.etl.saved import without
from viviane.schema import MOST_IDS, MOST_IN_A_LIST

RESERVED_PREFIX = "__"  # columns that staging adds


def refuse_repeated(names: list[str], what: str) -> None:
    """Refuse names that occur more than once.

    Raises:
        ValueError: naming them.
    """
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} named twice: {', '.join(twice)}")


class InputColumn(Settings):
    """One column of the raw files.

    Args:
        name: its name, in the header or by position.
        type: "hex" is a whole number written with 1 to 16 hexadecimal digits; "bool" is 0 or 1, of true and false, t
            and f, yes and no, y and n, 1 and 0; a missing or NaN float is missing.
        list: the column is a Parquet list.
        separator: the column is text that holds a list, such as "Comedy|Drama".
    """

    name: str = Field(min_length=1)
    type: Literal["float", "int", "string", "hex", "timestamp", "bool"] = "string"
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
        return self.type in ("float", "int", "bool")

    @property
    def staged(self) -> InputColumn:
        """The column once it is read: booleans are whole numbers then."""
        return self.model_copy(update={"type": "int"}) if self.type == "bool" else self


class Input(Settings):
    """How to read the raw files; Parquet is recognised by its first bytes and needs only `columns`.

    Args:
        columns: for text without header, every column in order; otherwise those that are used.
        delimiter: between values of a text line; several characters are allowed where quote is None.
        header: the first line of each text file holds the names.
        quote: character around values that contain the delimiter; None where quotes mean nothing.
        encoding: of text files.
        missing: texts of a missing value besides the empty one, in string columns of Parquet too.
        empty_is_missing: False: the empty text is a value of string columns, and malformed in others.
        hive_partitioning: columns are also taken from folders called `name=value`, which are searched. False: the name
            of a folder means nothing.
        file_name: the column, among `columns`, that holds the name of a row's file, without its folders.
    """

    columns: tuple[InputColumn, ...] = Field(min_length=1)
    delimiter: str = Field(default=",", min_length=1)
    header: bool = True
    quote: str | None = Field(default=None, min_length=1, max_length=1)
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ("",)
    empty_is_missing: bool = True
    hive_partitioning: bool = False
    file_name: str | None = None

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data = without(usual(self), "hive_partitioning", "file_name")
        return {key: value for key, value in data.items() if key != "empty_is_missing" or not value}

    @model_validator(mode="after")
    def _check(self) -> Input:
        refuse_repeated([column.name for column in self.columns], "input column")
        self._settle_missing()
        if self.file_name is not None:
            named = [column for column in self.columns if column.name == self.file_name]
            if not named or named[0].type != "string" or named[0].is_list:
                raise ValueError(
                    f'file_name {self.file_name!r}: add {{"name": {self.file_name!r}}} to columns, a string'
                )
        if len(self.delimiter) > 1 and self.quote is not None:
            raise ValueError("a delimiter of several characters cannot be combined with quote")
        try:
            plain = "a\n\t".encode(self.encoding) == b"a\n\t"
        except LookupError:
            raise ValueError(f"unknown encoding {self.encoding!r}") from None
        if not plain:
            raise ValueError(f"encoding {self.encoding!r} does not keep ASCII as it is; convert the files to UTF-8")
        return self

    def _settle_missing(self) -> None:
        """Make the empty text one of the missing ones, or keep it out of them."""
        others = tuple(text for text in self.missing if text)
        if not self.empty_is_missing and "missing" in self.model_fields_set and len(others) < len(self.missing):
            raise ValueError("the empty text is in missing, and empty_is_missing is false: leave out one of them")
        object.__setattr__(self, "missing", ("", *others) if self.empty_is_missing else others)


class LabelSpec(Settings):
    """A label: a number, perhaps through operators such as threshold, or a text. A row without it is malformed.

    Args:
        positive: of a label of text: the texts that are 1.
        negative: the texts that are 0; others are malformed rows then. Without it every other text is 0.
        optional: a row may lack it, a binary label; it is then -1, which counts neither in loss nor in metrics.
    """

    name: str = Field(min_length=1)
    source: str | None = None
    task: Literal["binary", "regression"] = "binary"
    operators: tuple[Operator, ...] = ()
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    optional: bool = False

    @model_validator(mode="after")
    def _check(self) -> LabelSpec:
        if self.negative and not self.positive:
            raise ValueError(f"label {self.name!r} has negative texts: name the positive ones too")
        if set(self.positive) & set(self.negative):
            raise ValueError(f"label {self.name!r} has texts that are both positive and negative")
        if self.positive and (self.operators or self.task != "binary"):
            raise ValueError(f"label {self.name!r} of text is binary and takes no operators")
        if self.optional and self.task != "binary":
            raise ValueError(f"label {self.name!r}: only binary labels are optional; filter the rows without it")
        return self

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "optional", "positive", "negative")


class DenseSpec(Settings):
    """A real number, or a vector of `dim` numbers from a list column; operators apply to every element."""

    name: str = Field(min_length=1)
    source: str | None = None
    dim: int = Field(default=1, ge=1, le=MOST_IN_A_LIST)
    operators: tuple[Operator, ...] = ()


class Categorify(Settings):
    """Number the values seen in training: 3, 4, ... by falling count, ties by value.

    Args:
        min_count: a value seen fewer times becomes the unknown id.
        max_values: keep only this many of the most frequent.
        unknown_buckets: this many ids after the last value take rare and unseen values, by hash; 0: all are id 2.
    """

    type: Literal["categorify"] = "categorify"
    min_count: int = Field(default=1, ge=1)
    max_values: int | None = Field(default=None, ge=1)
    unknown_buckets: int = Field(default=0, ge=0, le=2**30)

    @model_serializer(mode="wrap")
    def _plain(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without(usual(self), "unknown_buckets")


class GivenVocabulary(Settings):
    """Number given values: 3, 4, ... in their order; other values are the unknown id. Nothing is learned.

    Args:
        values: texts, or whole numbers, of the column; a hexadecimal number is a text.
        file: in place of values: a file of UTF-8 text with a value a line, or the first column of a Parquet file. It is
            read when learning; the fitted ETL holds the values.
        unknown_buckets: this many ids after the last value take other values, by hash; 0: all are id 2.
    """

    type: Literal["vocabulary"] = "vocabulary"
    values: tuple[int | str, ...] | None = Field(default=None, min_length=1)
    file: str | None = None
    unknown_buckets: int = Field(default=0, ge=0, le=2**30)

    @model_validator(mode="after")
    def _check(self) -> GivenVocabulary:
        if (self.values is None) == (self.file is None):
            raise ValueError("vocabulary takes either values or file")
        return self


class HashTo(Settings):
    """3 + h mod (num_ids - 3), h the first 60 bits of the MD5 of the value's text: nothing is learned or stored."""

    type: Literal["hash"] = "hash"
    num_ids: int = Field(ge=4, le=MOST_IDS)


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


Encoding: TypeAlias = Annotated[Categorify | GivenVocabulary | HashTo | Bucketize | RawIds, Field(discriminator="type")]


_PLAIN = (Categorify, GivenVocabulary)


class CategoricalSpec(Settings):
    """A column of ids.

    Args:
        source: the raw column; several names make a cross, whose value is the tuple of theirs. Lists are crossed value
            by value: each of them is paired with single values, and several lists of a row have one length.
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
    max_length: int | None = Field(default=None, ge=1, le=MOST_IN_A_LIST)
    keep: Literal["first", "last"] = "last"
    hotness: Annotated[int, Field(ge=1, le=MOST_IN_A_LIST)] | Literal["auto"] | None = None
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
    def is_plain(self) -> bool:
        """Whether values are counted and numbered as they are: no operator, cross or hash computes others first."""
        buckets = getattr(self.encoding, "unknown_buckets", 0)
        return len(self.sources) == 1 and not self.operators and isinstance(self.encoding, _PLAIN) and not buckets

    @property
    def table(self) -> str:
        """The vocabulary's name."""
        return self.vocabulary or self.name


OutputSpec: TypeAlias = LabelSpec | DenseSpec | CategoricalSpec
"""A column of the data set that the ETL writes."""
