"""Whether a loaded ETL holds all that its config needs, in the types that the values of rows have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from viviane.core.errors import DataError
from viviane.etl.cells import SCALARS, staged_type
from viviane.etl.columns import Bucketize, Categorify, GivenVocabulary, OutputSpec
from viviane.etl.config import EtlConfig
from viviane.etl.derivations import GroupDerivation, Join, key_names
from viviane.etl.learned import Learned

_NUMBERS = (pa.int64(), pa.float64())


def check_complete(fitted: Learned, where: str) -> None:
    """Refuse an ETL that lacks what it has to have learned, or holds it in another type.

    Raises:
        DataError: names what is missing or wrong, and where.
    """
    _check_joins(fitted, where)
    _check_groups(fitted, where)
    _check_states(fitted, where)
    _check_vocabularies(fitted, where)


def _check_joins(fitted: Learned, where: str) -> None:
    for one in fitted.config.derived:
        if not isinstance(one, Join):
            continue
        table = fitted.external.get(one.name)
        if table is None or table.rows.column_names != list(one.stored.values()):
            raise DataError("the fitted ETL lacks the table of a join", where=where, value=one.name)
        columns = {column.name: staged_type(column.staged) for column in one.input.columns}
        for name, stored in one.stored.items():
            values = table.rows.column(stored)
            _check_column(values, (columns[name],), f"{where}, join {one.name!r}, column {name!r}",
                          complete=name in one.keys)  # fmt: skip


def _check_groups(fitted: Learned, where: str) -> None:
    for one in fitted.config.derived:
        if not isinstance(one, GroupDerivation):
            continue
        place = f"{where}, derivation {one.name!r}"
        groups = fitted.groups.get(one.name)
        made = {name for name, _, _ in one.made(fitted.config.staged_column)}
        if groups is None or set(groups.values) != made:
            raise DataError(
                "the fitted ETL lacks what a derivation learned", where=place, value=", ".join(sorted(made))
            )
        _check_column(groups.keys, _value_types(fitted.config, key_names(one.by)), f"{place}, keys", complete=True)
        for name, numbers in groups.values.items():
            if numbers.dtype != np.float64:
                raise DataError("the fitted ETL holds a column of another type", where=f"{place}, column {name!r}",
                                value=str(numbers.dtype), allowed="float64")  # fmt: skip


def _check_states(fitted: Learned, where: str) -> None:
    config = fitted.config
    specs: tuple[OutputSpec, ...] = (*config.labels, *config.dense, *config.categorical)
    for spec in specs:
        states = fitted.states.get(spec.name, {})
        for at, operator in enumerate(spec.operators):
            lacking = [name for name in getattr(operator, "learns", ()) if name not in states.get(at, {})]
            if lacking:
                raise DataError("the fitted ETL lacks what an operator learned", value=lacking[0],
                                where=f"{where}, column {spec.name!r}, operator {at}")  # fmt: skip


def _check_vocabularies(fitted: Learned, where: str) -> None:
    for spec in fitted.config.categorical:
        name, encoding = spec.table, spec.encoding
        if isinstance(encoding, Bucketize) and name not in fitted.borders:
            raise DataError("the fitted ETL lacks the borders of a column", where=where, value=name)
        if not isinstance(encoding, (Categorify, GivenVocabulary)):
            continue
        if name not in fitted.vocabularies:
            raise DataError("the fitted ETL lacks a vocabulary", where=where, value=name)
        found, place = fitted.vocabularies[name], f"{where}, vocabulary {name!r}"
        types = _NUMBERS if spec.operators else _value_types(fitted.config, spec.sources)
        _check_column(found.values, types, f"{place}, values", complete=True)
        _check_column(found.counts, (pa.int64(),), f"{place}, counts", complete=True)


def _value_types(config: EtlConfig, names: tuple[str, ...]) -> tuple[pa.DataType, ...]:
    """The type of single values of a column, or of the text for a tuple of several columns."""
    return (SCALARS[config.staged_column(names[0]).type] if len(names) == 1 else pa.string(),)


def _check_column(values: Any, types: tuple[pa.DataType, ...], where: str, *, complete: bool) -> None:
    """Refuse another type than those allowed and, of what has to be complete, missing values."""
    if not any(_same(values.type, one) for one in types):
        raise DataError("the fitted ETL holds a column of another type", where=where, value=str(values.type),
                        allowed=" or ".join(map(str, types)), fix="use the file that `viviane etl` wrote")  # fmt: skip
    if complete and values.null_count:
        raise DataError("the fitted ETL misses values that it has to have", where=where,
                        value=f"{values.null_count} of {len(values)}")  # fmt: skip


def _same(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types, whatever the values inside of lists are called."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return bool(found.value_type == wanted.value_type)
    return bool(found == wanted)
