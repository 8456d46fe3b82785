"""Raw rows of small requests to a batch, value by value in Python, with the bits of the model's ETL.

The ETL runs queries and hashes its vocabularies for each table, which takes milliseconds whatever the number of
rows. Here each column is a function that was made once. What a request may hold is narrow: ordinary numbers and texts
in columns that are neither derived nor crossed. Anything else, malformed values above all, is left to the ETL.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from viviane.batch import Bag, Batch, Layout
from viviane.etl import FittedEtl
from viviane.etl.columns import Bucketize, CategoricalSpec, Categorify, DenseSpec, HashTo, InputColumn
from viviane.etl.operators import Clip, Fill, Log, LogSquare, MinMax, Operator, Standardize, State, Threshold
from viviane.schema import RESERVED, Schema
from viviane.serving.vocabularies import Find, vocabulary_index

MOST_ROWS: Final = 64
"""Rows up to which this is quicker than the ETL."""
_ORDINARY: Final = 1e15
_ALL_WHOLE: Final = 2.0**53
_HASH_DIGITS: Final = 15
_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_HEX: Final = re.compile(r"[0-9a-fA-F]{1,16}")

Number: TypeAlias = Callable[[float | None], float | None]
Read: TypeAlias = Callable[[Any], Any]
Ids: TypeAlias = Callable[[Any], int]


class _LeftToTheEtlError(Exception):
    """A value, or a column, that must go through the ETL."""


class PlainRows:
    """Encodes requests of up to `MOST_ROWS` raw rows.

    Args:
        etl: fitted, without labels.
        schema: of the model.

    Raises:
        _LeftToTheEtlError: the ETL has columns of a kind that is not made here; `plain_rows` gives None then.
    """

    def __init__(self, etl: FittedEtl, schema: Schema, origin: str) -> None:
        config = etl.config
        if config.derived or config.sample_weight is not None or any(c.weights for c in schema.categorical):
            raise _LeftToTheEtlError
        missing = frozenset(config.input.missing)
        self._layout, self._origin = Layout.of(schema), origin
        self._id_type: Any = np.int64 if any(column.dtype == "int64" for column in schema.one_hot) else np.int32
        dense = {spec.name: spec for spec in config.dense}
        ids = {spec.name: spec for spec in config.categorical}
        indexes: dict[str, Find] = {}
        self._numbers = [_dense_column(etl, dense[column.name]) for column in schema.dense]
        self._singles = [_ids_column(etl, ids[column.name], missing, indexes) for column in schema.one_hot]
        self._bags = [
            (column.name, np.int64 if column.dtype == "int64" else np.int32,
             *_lists_column(etl, ids[column.name], missing, indexes))
            for column in schema.bags
        ]  # fmt: skip
        self.columns = tuple(dict.fromkeys([one[0] for one in (*self._numbers, *self._singles)] + [
            one[2] for one in self._bags
        ]))  # fmt: skip

    def encode(self, rows: Any) -> Batch | None:
        """Return rows as a batch, or None where they are to be given to the ETL.

        Args:
            rows: columns by name (lists, tuples or arrays), or a list of dicts; others are given to the ETL.
        """
        try:
            columns, size = self._columns_of(rows)
            return self._batch(columns, size)
        except (_LeftToTheEtlError, OverflowError, UnicodeEncodeError):
            return None

    def _columns_of(self, rows: Any) -> tuple[dict[str, Sequence[Any]], int]:
        if isinstance(rows, list):
            if not 0 < len(rows) <= MOST_ROWS or not all(type(row) is dict for row in rows):
                raise _LeftToTheEtlError
            try:
                return {name: [row[name] for row in rows] for name in self.columns}, len(rows)
            except KeyError:
                raise _LeftToTheEtlError from None
        if not isinstance(rows, Mapping):
            raise _LeftToTheEtlError
        found: dict[str, Sequence[Any]] = {}
        sizes = set()
        for name in self.columns:
            values = rows.get(name)
            if isinstance(values, np.ndarray) and values.ndim == 1 and len(values) <= MOST_ROWS:
                values = values.tolist()
            if not isinstance(values, list | tuple):
                raise _LeftToTheEtlError
            found[name] = values
            sizes.add(len(values))
        if len(sizes) != 1 or not 0 < max(sizes) <= MOST_ROWS:
            raise _LeftToTheEtlError
        return found, sizes.pop()

    def _batch(self, columns: dict[str, Sequence[Any]], size: int) -> Batch:
        dense = np.empty((size, len(self._numbers)), np.float32)
        for place, (name, make) in enumerate(self._numbers):
            dense[:, place] = [make(value) for value in columns[name]]
        one_hot = np.empty((size, len(self._singles)), self._id_type)
        for place, (name, ids) in enumerate(self._singles):
            one_hot[:, place] = [ids(value) for value in columns[name]]
        bags = {}
        for name, dtype, source, lists in self._bags:
            rows = [lists(value) for value in columns[source]]
            offsets = np.zeros(size + 1, np.int64)
            np.cumsum([len(row) for row in rows], out=offsets[1:])
            flat = np.array([one for row in rows for one in row], dtype)
            bags[name] = Bag(torch.from_numpy(flat), torch.from_numpy(offsets))
        return Batch(
            self._layout, torch.zeros(size, 0), torch.from_numpy(dense), torch.from_numpy(one_hot), bags,
            origin=self._origin,
        )  # fmt: skip


def plain_rows(etl: FittedEtl, schema: Schema, origin: str) -> PlainRows | None:
    """Return the encoder of small requests, or None where the ETL has columns of another kind."""
    try:
        return PlainRows(etl, schema, origin)
    except _LeftToTheEtlError:
        return None


# Columns ------------------------------------------------------------------------------------------------------


def _dense_column(etl: FittedEtl, spec: DenseSpec) -> tuple[str, Callable[[Any], float]]:
    column = etl.config.column(spec.source or spec.name)
    if spec.dim > 1 or column.is_list or column.type not in ("float", "int"):
        raise _LeftToTheEtlError
    read, operators = _READERS[column.type], _chain(spec.operators, etl.states.get(spec.name, {}))

    def make(value: Any) -> float:
        found = operators(_ordinary(read(value)))
        if found is None or not abs(found) <= _ORDINARY:
            raise _LeftToTheEtlError
        return found

    return column.name, make


def _ids_column(
    etl: FittedEtl, spec: CategoricalSpec, missing: frozenset[str], indexes: dict[str, Find]
) -> tuple[str, Ids]:
    column = _source(etl, spec)
    if column.is_list:
        raise _LeftToTheEtlError
    read, ids = _reader(column, missing), _ids(etl, spec, column, indexes)
    return column.name, lambda value: ids(read(value))


def _lists_column(
    etl: FittedEtl, spec: CategoricalSpec, missing: frozenset[str], indexes: dict[str, Find]
) -> tuple[str, Callable[[Any], list[int]]]:
    column = _source(etl, spec)
    if not column.is_list or spec.hotness is not None or column.type not in _ELEMENTS:
        raise _LeftToTheEtlError
    element, ids, separator = _ELEMENTS[column.type], _ids(etl, spec, column, indexes), column.separator
    most, last = spec.max_length, spec.keep == "last"
    absent = [ids(None)]

    def make(value: Any) -> list[int]:
        if value is None or (type(value) is str and value in missing):
            return absent
        if type(value) is str and separator is not None:
            value.encode()
            texts: list[Any] = value.split(separator)
            values = [None if one in missing else element(one) for one in texts]
        elif type(value) is list:
            kinds = {type(one) for one in value}
            if len(kinds) > 1 or not kinds <= {_KINDS[column.type]}:
                raise _LeftToTheEtlError
            values = [None if one in missing else element(one) for one in value]
        else:
            raise _LeftToTheEtlError
        if most is not None and len(values) > most:
            values = values[-most:] if last else values[:most]
        return [ids(one) for one in values]

    return column.name, make


def _source(etl: FittedEtl, spec: CategoricalSpec) -> InputColumn:
    if len(spec.sources) != 1:
        raise _LeftToTheEtlError
    return etl.config.column(spec.sources[0])


def _ids(etl: FittedEtl, spec: CategoricalSpec, column: InputColumn, indexes: dict[str, Find]) -> Ids:
    """Return what makes an id of a value as the ETL has it after reading, perhaps None."""
    encoding = spec.encoding
    if spec.operators or isinstance(encoding, Bucketize):
        if not column.is_number:
            raise _LeftToTheEtlError
        operators = _chain(spec.operators, etl.states.get(spec.name, {}))
    else:
        operators = None
    if isinstance(encoding, Bucketize):
        borders = list(etl.borders[spec.table])
        find: Ids = lambda value: bisect_right(borders, value) + RESERVED.first  # noqa: E731
    elif isinstance(encoding, HashTo) and operators is None and column.type != "float":
        num_ids = encoding.num_ids - RESERVED.first
        find = lambda value: _hashed(value) % num_ids + RESERVED.first  # noqa: E731
    elif isinstance(encoding, Categorify) and not encoding.unknown_buckets:
        find = _numbered(etl, spec.table, indexes)
    else:
        raise _LeftToTheEtlError

    def make(value: Any) -> int:
        if operators is not None:
            value = operators(_ordinary(value))
        return RESERVED.missing if value is None else find(value)

    return make


def _numbered(etl: FittedEtl, table: str, indexes: dict[str, Find]) -> Ids:
    if table not in indexes:
        indexes[table] = vocabulary_index(etl.vocabularies[table].values)
    find = indexes[table]

    def make(value: Any) -> int:
        place = find(value)
        return RESERVED.unknown if place is None else place + RESERVED.first

    return make


def _hashed(value: Any) -> int:
    """Return the first 60 bits of the MD5 of a value's text, as `viviane.etl.expressions.hashed` does."""
    return int(hashlib.md5(str(value).encode(), usedforsecurity=False).hexdigest()[:_HASH_DIGITS], 16)


# Values -------------------------------------------------------------------------------------------------------


def _reader(column: InputColumn, missing: frozenset[str]) -> Read:
    if column.type not in _READERS:
        raise _LeftToTheEtlError
    read = _READERS[column.type]
    if column.type not in ("string", "hex"):
        return read
    return lambda value: None if type(value) is str and value in missing else read(value)


def _float(value: Any) -> float | None:
    if type(value) is float:
        if math.isfinite(value):
            return value + 0.0  # -0.0 and 0.0 are one number
        if math.isnan(value):
            return None
    elif type(value) is int and abs(value) <= _ALL_WHOLE:
        return float(value)
    elif value is None:
        return None
    raise _LeftToTheEtlError


def _int(value: Any) -> int | None:
    if value is None or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    raise _LeftToTheEtlError


def _text(value: Any) -> str | None:
    if type(value) is str:
        if not value.isascii():
            value.encode()  # half of a surrogate pair is no text
        return value
    if value is None:
        return None
    raise _LeftToTheEtlError


def _hex(value: Any) -> int | None:
    if type(value) is str and _HEX.fullmatch(value):
        return int(value, 16)
    if type(value) is int and 0 <= value < 2**64:
        return value
    raise _LeftToTheEtlError


def _whole(value: Any) -> int | None:
    if type(value) is str:
        if not _WHOLE.fullmatch(value):
            raise _LeftToTheEtlError
        return int(value)
    return _int(value)


_READERS: Final[dict[str, Read]] = {"float": _float, "int": _int, "string": _text, "hex": _hex}
_ELEMENTS: Final[dict[str, Read]] = {"int": _whole, "string": _text}
_KINDS: Final[dict[str, type]] = {"int": int, "string": str}


def _ordinary(value: float | None) -> float | None:
    if value is not None and abs(value) > _ORDINARY:
        raise _LeftToTheEtlError
    return value


# Operators, each as its expression in `viviane.etl.operators` -------------------------------------------------


def _chain(operators: Sequence[Operator], states: Mapping[int, State]) -> Number:
    steps = [_step(operator, states.get(place, {})) for place, operator in enumerate(operators)]

    def run(value: float | None) -> float | None:
        if value is not None:
            value = float(value)
        for step in steps:
            value = step(value)
        return value

    return run


def _step(operator: Operator, state: State) -> Number:
    if isinstance(operator, Fill):
        given = state[operator.value] if isinstance(operator.value, str) else operator.value
        return lambda x: given if x is None else x
    if type(operator) not in _STEPS:
        raise _LeftToTheEtlError
    return _known(_STEPS[type(operator)](operator, state))


def _known(step: Callable[[float], float]) -> Number:
    return lambda x: None if x is None else step(x)


def _clip(operator: Clip, _: State) -> Callable[[float], float]:
    low = -math.inf if operator.min is None else operator.min
    high = math.inf if operator.max is None else operator.max
    return lambda x: min(max(x, low), high)


def _log_square(x: float) -> float:
    if x > 2.0:
        root = math.log(x)
        return float(math.floor(root * root))
    return x if x < -_ALL_WHOLE else float(math.floor(x))


def _standardize(_: Standardize, state: State) -> Callable[[float], float]:
    mean, std = state["mean"], state["std"] or 1.0
    return lambda x: (x - mean) / std


def _min_max(_: MinMax, state: State) -> Callable[[float], float]:
    low, span = state["min"], (state["max"] - state["min"]) or 1.0
    return lambda x: min(max((x - low) / span, 0.0), 1.0)


def _threshold(operator: Threshold, _: State) -> Callable[[float], float]:
    return lambda x: float(x >= operator.at)


_STEPS: Final[dict[type, Callable[[Any, State], Callable[[float], float]]]] = {
    Clip: _clip,
    Log: lambda _, __: lambda x: math.log(max(x, 0.0) + 1.0),
    LogSquare: lambda _, __: _log_square,
    Standardize: _standardize,
    MinMax: _min_max,
    Threshold: _threshold,
}
