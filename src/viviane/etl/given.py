"""Vocabularies that the config gives, in place of those that are learned from the training rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from viviane.core.errors import DataError, DataNotFoundError
from viviane.core.locations import location
from viviane.etl.cells import convert
from viviane.etl.columns import GivenVocabulary, InputColumn
from viviane.etl.config import EtlConfig
from viviane.etl.values import combined


def given_vocabularies(config: EtlConfig) -> dict[str, Any]:
    """Return the given values by vocabulary, as arrays of the type of their columns, in the order of their ids.

    Raises:
        DataError: a file is missing or cannot be read; a value is missing, of another type, or occurs twice.
    """
    found: dict[str, Any] = {}
    for spec in config.categorical:
        if isinstance(spec.encoding, GivenVocabulary) and spec.table not in found:
            column = config.column(spec.sources[0])
            found[spec.table] = _typed(*_values(spec.encoding, spec.name), column)
    return found


def digest_of(vocabularies: Mapping[str, Any]) -> list[str]:
    """Return what distinguishes given values from others."""
    return [hashlib.sha256(repr((name, one.to_pylist())).encode()).hexdigest() for name, one in vocabularies.items()]


def _values(encoding: GivenVocabulary, name: str) -> tuple[Any, str]:
    """The values as text, or as the Parquet file has them, and where they are from."""
    if encoding.file is None:
        return pa.array([str(one) for one in encoding.values or ()], pa.string()), f"the vocabulary of column {name!r}"
    place = location(encoding.file)
    if not place.exists() or place.is_dir():
        raise DataNotFoundError("no such file of a vocabulary", where=f"column {name!r}", value=encoding.file)
    try:
        with place.open("rb") as file:
            data = file.read()
        if data[:4] == b"PAR1":
            return combined(pq.read_table(pa.BufferReader(data)).column(0)), encoding.file
        lines = data.removeprefix(b"\xef\xbb\xbf").decode().replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError, pa.ArrowException, IndexError) as error:
        raise DataError(
            "the file of a vocabulary cannot be read", where=encoding.file, value=(str(error).splitlines() or [""])[0],
            allowed="UTF-8 text with a value a line, or Parquet",
        ) from error  # fmt: skip
    return pa.array(lines[:-1] if lines[-1] == "" else lines, pa.string()), encoding.file


def _typed(values: Any, where: str, column: InputColumn) -> Any:
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    single = column.model_copy(update={"list": False, "separator": None})
    if pa.types.is_integer(values.type) and single.type == "string":
        raise DataError("a vocabulary of whole numbers, for a column of texts", where=where, value=str(values.type))
    try:
        typed, bad = convert(values, single, ())
    except pa.ArrowException as error:
        raise DataError("a vocabulary of another type", where=where, value=str(error), allowed=single.type) from error
    if bad:
        place = f"{where}, value {bad[0].row + 1}"
        raise DataError(f"a value of a vocabulary is {bad[0].problem}", where=place, value=bad[0].value)
    empty: Any = pc.is_null(typed) if single.type != "string" else pc.equal(pc.fill_null(typed, ""), pa.scalar(""))
    if pc.any(empty).as_py():
        row = int(np.flatnonzero(empty.to_numpy(zero_copy_only=False))[0])
        raise DataError(
            "a value of a vocabulary is missing", where=f"{where}, value {row + 1}", fix="leave it out: it has id 1"
        )
    if len(typed) == 0:
        raise DataError("a vocabulary has no value", where=where)
    codes = typed.dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    if len(first) < len(codes):
        again = int(np.setdiff1d(np.arange(len(codes)), first)[0])
        raise DataError("a value of a vocabulary occurs twice", where=f"{where}, value {again + 1}",
                        value=typed[again].as_py())  # fmt: skip
    return typed
