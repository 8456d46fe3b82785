"""Columns of raw rows to numbers and ids in Python, with the bits of the model's ETL.

Each column is a function of its values that is made once. Values of one ordinary kind are computed side by side, others
one by one; what is not ordinary raises `LeftToTheEtlError`.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from viviane.etl import FittedEtl
from viviane.etl.columns import Bucketize, CategoricalSpec, Categorify, DenseSpec, HashTo, InputColumn
from viviane.etl.operators import Clip, Fill, Log, LogSquare, MinMax, Operator, Standardize, State, Threshold
from viviane.schema import RESERVED
from viviane.serving.vocabularies import Find, vocabulary_index

_ORDINARY: Final = 1e15
_ALL_WHOLE: Final = 2.0**53
_INT64: Final = 2**63
_FEW: Final = 6
"""Values that are sooner read one by one."""
_HASH_DIGITS: Final = 15
_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_HEX: Final = re.compile(r"[0-9a-fA-F]{1,16}")

Number: TypeAlias = Callable[[float | None], float | None]
Numbers: TypeAlias = NDArray[np.float64]
Read: TypeAlias = Callable[[Any], Any]
Ids: TypeAlias = Callable[[Any], int]
Column: TypeAlias = Callable[[Sequence[Any]], Any]
"""From the values of a column, which may be of any kind, to an array or a list as long."""


class LeftToTheEtlError(Exception):
    """A value, or a column, that must go through the ETL."""


def dense_column(etl: FittedEtl, spec: DenseSpec) -> tuple[str, Column]:
    """Return the raw column, and what makes numbers of its values.

    Raises:
        LeftToTheEtlError: the column is of another kind.
    """
    column = etl.config.column(spec.source or spec.name)
    if spec.dim > 1 or column.is_list or column.type not in ("float", "int"):
        raise LeftToTheEtlError
    states = etl.states.get(spec.name, {})
    read, operators = _READERS[column.type], _chain(spec.operators, states)
    together = [_step_of_many(operator, states.get(place, {})) for place, operator in enumerate(spec.operators)]
    first = spec.operators[0] if spec.operators else None
    fill = _fill_value(first, states.get(0, {})) if isinstance(first, Fill) else None
    kinds: set[type] = {int} if column.type == "int" else {int, float}

    def make(value: Any) -> float:
        found = operators(_ordinary(read(value)))
        if found is None or not abs(found) <= _ORDINARY:
            raise LeftToTheEtlError
        return found

    def make_all(values: Sequence[Any]) -> Numbers | list[float]:
        found = None if len(values) < _FEW else _ordinary_numbers(values, kinds, fill)
        if found is None:
            return [make(value) for value in values]
        for step in together:
            found = step(found)
        if not (np.abs(found) <= _ORDINARY).all():
            raise LeftToTheEtlError
        return found

    return column.name, make_all


def _ordinary_numbers(values: Sequence[Any], kinds: set[type], fill: float | None) -> Numbers | None:
    """Return values as an array, with `fill` for missing ones, or None where they are to be read one by one."""
    found = {*map(type, values)}
    if fill is not None and type(None) in found:
        found.remove(type(None))
        values = [fill if value is None else value for value in values]
    if not found <= kinds:
        return None
    numbers = np.array(values, np.float64) + 0.0  # -0.0 and 0.0 are one number
    if fill is not None and np.isnan(numbers).any():
        numbers = np.where(np.isnan(numbers), float(fill), numbers)
    return numbers if (np.abs(numbers) <= _ORDINARY).all() else None


def ids_column(
    etl: FittedEtl, spec: CategoricalSpec, missing: frozenset[str], indexes: dict[str, Find]
) -> tuple[str, Column]:
    """Return the raw column, and what makes ids of its values.

    Raises:
        LeftToTheEtlError: the column is of another kind.
    """
    column = _source(etl, spec)
    if column.is_list:
        raise LeftToTheEtlError
    read, ids = _reader(column, missing), _ids(etl, spec, column, indexes)
    find = None
    if isinstance(spec.encoding, Categorify) and not spec.operators and column.type in ("string", "int"):
        find = indexes[spec.table]
    values_of = _ordinary_texts if column.type == "string" else _ordinary_whole_numbers
    absent, unknown, first = RESERVED.missing, RESERVED.unknown, RESERVED.first

    def make_all(values: Sequence[Any]) -> list[int]:
        found = None if find is None or len(values) < _FEW else values_of(values, missing)
        if found is None or find is None:
            return [ids(read(value)) for value in values]
        return [
            absent if value is None else unknown if (place := find(value)) is None else place + first
            for value in found
        ]  # fmt: skip

    return column.name, make_all


def _ordinary_texts(values: Sequence[Any], missing: frozenset[str]) -> Sequence[str | None] | None:
    """Return texts, None for missing ones, or None where values are to be read one by one."""
    kinds = {*map(type, values)}
    if not kinds <= {str, type(None)}:
        return None
    if not missing.isdisjoint(values):
        values = [None if value in missing else value for value in values]
    joined = "".join(values if kinds == {str} and None not in values else filter(None, values))
    if not joined.isascii():
        joined.encode()  # half of a surrogate pair is no text
    return values


def _ordinary_whole_numbers(values: Sequence[Any], _: frozenset[str]) -> Sequence[int | None] | None:
    if not {*map(type, values)} <= {int, type(None)}:
        return None
    present = [value for value in values if value is not None]
    if present and not (min(present) >= -_INT64 and max(present) < _INT64):
        return None
    return values


def lists_column(
    etl: FittedEtl, spec: CategoricalSpec, missing: frozenset[str], indexes: dict[str, Find]
) -> tuple[str, Callable[[Any], list[int]]]:
    """Return the raw column, and what makes ids of the list that one value is.

    Raises:
        LeftToTheEtlError: the column is of another kind.
    """
    column = _source(etl, spec)
    if not column.is_list or spec.hotness is not None or column.type not in _ELEMENTS:
        raise LeftToTheEtlError
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
                raise LeftToTheEtlError
            values = [None if one in missing else element(one) for one in value]
        else:
            raise LeftToTheEtlError
        if most is not None and len(values) > most:
            values = values[-most:] if last else values[:most]
        return [ids(one) for one in values]

    return column.name, make


def _source(etl: FittedEtl, spec: CategoricalSpec) -> InputColumn:
    if len(spec.sources) != 1:
        raise LeftToTheEtlError
    return etl.config.column(spec.sources[0])


def _ids(etl: FittedEtl, spec: CategoricalSpec, column: InputColumn, indexes: dict[str, Find]) -> Ids:
    """Return what makes an id of a value as the ETL has it after reading, perhaps None."""
    encoding = spec.encoding
    if spec.operators or isinstance(encoding, Bucketize):
        if not column.is_number:
            raise LeftToTheEtlError
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
        raise LeftToTheEtlError

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
        raise LeftToTheEtlError
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
    raise LeftToTheEtlError


def _int(value: Any) -> int | None:
    if value is None or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    raise LeftToTheEtlError


def _text(value: Any) -> str | None:
    if type(value) is str:
        if not value.isascii():
            value.encode()  # half of a surrogate pair is no text
        return value
    if value is None:
        return None
    raise LeftToTheEtlError


def _hex(value: Any) -> int | None:
    if type(value) is str and _HEX.fullmatch(value):
        return int(value, 16)
    if value is None or (type(value) is int and 0 <= value < 2**64):
        return value
    raise LeftToTheEtlError


def _whole(value: Any) -> int | None:
    if type(value) is str:
        if not _WHOLE.fullmatch(value):
            raise LeftToTheEtlError
        return int(value)
    return _int(value)


_READERS: Final[dict[str, Read]] = {"float": _float, "int": _int, "string": _text, "hex": _hex}
_ELEMENTS: Final[dict[str, Read]] = {"int": _whole, "string": _text}
_KINDS: Final[dict[str, type]] = {"int": int, "string": str}


def _ordinary(value: float | None) -> float | None:
    if value is not None and abs(value) > _ORDINARY:
        raise LeftToTheEtlError
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
        given = _fill_value(operator, state)
        return lambda x: given if x is None else x
    if type(operator) not in _STEPS:
        raise LeftToTheEtlError
    return _known(_STEPS[type(operator)](operator, state))


def _fill_value(operator: Fill, state: State) -> float:
    return state[operator.value] if isinstance(operator.value, str) else operator.value


def _step_of_many(operator: Operator, state: State) -> Callable[[Numbers], Numbers]:
    """Return what `_step` does, for an array without missing numbers."""
    if isinstance(operator, Fill):
        return lambda x: x
    if isinstance(operator, Clip):
        low, high = _bounds(operator)
        return lambda x: _within(x, low, high)
    if isinstance(operator, Standardize):
        mean, std = state["mean"], state["std"] or 1.0
        return lambda x: (x - mean) / std
    if isinstance(operator, MinMax):
        least, span = state["min"], (state["max"] - state["min"]) or 1.0
        return lambda x: _within((x - least) / span, 0.0, 1.0)
    if isinstance(operator, Log):  # NumPy's logarithm has other bits
        return lambda x: np.array(list(map(math.log, (np.where(x < 0.0, 0.0, x) + 1.0).tolist())), np.float64)
    one = _STEPS[type(operator)](operator, state)
    return lambda x: np.array([one(number) for number in x.tolist()], np.float64)


def _within(x: Numbers, low: float, high: float) -> Numbers:
    """Return min(max(x, low), high), which of equal numbers takes the one that Python takes."""
    x = np.where(low > x, low, x)
    return np.where(high < x, high, x)


def _bounds(operator: Clip) -> tuple[float, float]:
    return (
        -math.inf if operator.min is None else operator.min,
        math.inf if operator.max is None else operator.max,
    )  # fmt: skip


def _known(step: Callable[[float], float]) -> Number:
    return lambda x: None if x is None else step(x)


def _clip(operator: Clip, _: State) -> Callable[[float], float]:
    low, high = _bounds(operator)
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
