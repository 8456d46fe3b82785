"""Requests of a load test: rows of a file, or made up from the model's metadata, as binary tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from viviane.core.errors import ConfigError, DataError
from viviane.serving.columns import ColumnSpec
from viviane.serving.server.example_rows import example_rows
from viviane.serving.server.tensors import BYTES, DATATYPES, LENGTHS, MISSING

_DIFFERENT: Final = 256
"""Requests that are prepared; a load test sends them in turn."""
_MOST_VALUES: Final = 1 << 26
"""Values that are made up for one request."""
_MOST_MADE: Final = 1 << 22
"""Values that are made up for all requests, beyond the first request."""
_OF_DATATYPE: Final[dict[str, Any]] = {"FP32": "float32", "FP64": "float64", "INT32": "int32", "INT64": "int64",
                                       BYTES: "string"}  # fmt: skip


@dataclass(frozen=True)
class PreparedRequest:
    """One request, encoded.

    Args:
        inputs: name, datatype, shape and bytes of each tensor.
    """

    inputs: tuple[tuple[str, str, tuple[int, ...], bytes], ...]

    def http_body(self) -> tuple[bytes, int]:
        """Return the body of an HTTP request with binary tensors, and the length of its JSON."""
        inputs = [
            {"name": name, "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": len(data)}}
            for name, datatype, shape, data in self.inputs
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        return head + b"".join(data for *_, data in self.inputs), len(head)


class RequestSource:
    """Makes requests for a model.

    Args:
        inputs: the model's inputs, as its metadata lists them.
        columns: its columns, where the server describes them; ids are then in range.
        table: rows to send; None makes rows up.
    """

    def __init__(
        self, inputs: Sequence[Mapping[str, Any]], columns: Sequence[ColumnSpec] | None, table: pa.Table | None
    ) -> None:
        given = [one for one in inputs if not one["name"].endswith((LENGTHS, MISSING))]
        self._inputs = {str(one["name"]): (str(one["datatype"]), list(one["shape"])) for one in given}
        self._columns = columns or [_guess(name, *kind) for name, kind in self._inputs.items()]
        self._table = table
        if table is not None:
            missing = [name for name in self._inputs if name not in table.column_names]
            if missing:
                raise DataError("the rows lack a column of the model", value=missing[0],
                                allowed=", ".join(table.column_names)[:1000])  # fmt: skip

    def prepared(self, rows: int, seed: int) -> list[PreparedRequest]:
        """Return different requests of this many rows each.

        Raises:
            ConfigError: a request would be too large.
            DataError: a value of the rows does not fit its input.
        """
        if self._table is None:
            width = sum(max(1, one.shape[1]) if len(one.shape) > 1 else 1 for one in self._columns)
            if width * rows > _MOST_VALUES:
                raise ConfigError("a request would be too large", where=f"{rows:,} rows",
                                  value=f"{width * rows:,} values", allowed=f"at most {_MOST_VALUES:,}")  # fmt: skip
            count = min(_DIFFERENT, max(8, 4096 // rows), max(1, _MOST_MADE // (width * rows)))
            made = example_rows(self._columns, rows * count, seed)
        else:
            count = self._table.num_rows
            if not count:
                raise DataError("there are no rows to send", value="0 rows", fix="name a file with rows: --rows")
            draw = np.random.default_rng(seed).integers(0, count, rows * min(_DIFFERENT, max(8, count // rows)))
            made = self._table.select(list(self._inputs)).take(draw).to_pylist()
        return [self._request(made[start : start + rows]) for start in range(0, len(made), rows)]

    def _request(self, rows: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        tensors: list[tuple[str, str, tuple[int, ...], bytes]] = []
        for name, (datatype, shape) in self._inputs.items():
            values = [row[name] for row in rows]
            if len(shape) > 1 and shape[1] != 1:
                tensors += _list_tensors(name, datatype, values, ragged=shape[1] < 0)
            else:
                tensors.append((name, datatype, (len(rows), 1), _bytes(name, datatype, values)))
                if datatype != BYTES and any(value is None for value in values):
                    mask = np.array([value is None for value in values])
                    tensors.append((name + MISSING, "BOOL", (len(rows), 1), mask.tobytes()))
        return PreparedRequest(tuple(tensors))


def read_rows(path: str | Path, limit: int = 100_000) -> pa.Table:
    """Return rows of a Parquet, CSV or JSON-lines file, or of the Parquet files of a folder; at most this many.

    Raises:
        ConfigError: no such file, or of another kind.
    """
    import pyarrow.csv
    import pyarrow.dataset
    import pyarrow.json

    place = Path(path)
    if not place.exists():
        raise ConfigError("no such rows", where=str(place))
    readers: dict[str, Any] = {".csv": pyarrow.csv.read_csv, ".jsonl": pyarrow.json.read_json,
                               ".ndjson": pyarrow.json.read_json}  # fmt: skip
    try:
        if place.is_dir() or place.suffix == ".parquet":
            files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
            return pyarrow.dataset.dataset([str(one) for one in files]).head(limit)
        if place.suffix not in readers:
            raise ConfigError("rows of this kind cannot be sent", where=str(place), allowed=".parquet, .csv, .jsonl")
        table: pa.Table = readers[place.suffix](str(place))
        return table.slice(0, limit)
    except (pa.ArrowException, OSError) as error:
        raise DataError("the rows cannot be read", where=str(place), value=str(error)) from error


def _guess(name: str, datatype: str, shape: Sequence[int]) -> ColumnSpec:
    kind = _OF_DATATYPE.get(datatype, "int64" if "INT" in datatype else "float32")
    dims = (-1,) if len(shape) < 2 or shape[1] == 1 else (-1, shape[1])
    return ColumnSpec(name, kind, dims, raw=datatype in (BYTES, "FP64", "INT64"), num_ids=4)


def _list_tensors(
    name: str, datatype: str, values: Sequence[Any], *, ragged: bool
) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    wrong = next((value for value in values if not isinstance(value, list | None)), None)
    if wrong is not None:
        raise DataError("a value does not fit its input", where=f"input {name!r}", value=str(wrong), allowed="a list")
    lists = [list(value or ()) for value in values]
    lengths = np.array([len(one) for one in lists], np.int32)
    width = max(1, int(lengths.max(initial=0)))
    filler: Any = "" if datatype == BYTES else 0
    flat = [value for one in lists for value in [*one, *[filler] * (width - len(one))]]
    found: list[tuple[str, str, tuple[int, ...], bytes]] = []
    found.append((name, datatype, (len(lists), width), _bytes(name, datatype, flat)))
    if ragged:
        found.append((name + LENGTHS, "INT32", (len(lists), 1), lengths.tobytes()))
    return found


def _bytes(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == BYTES:
        texts = [b"" if value is None else str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    try:
        return np.array([0 if value is None else value for value in values], DATATYPES[datatype]).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError("a value does not fit its input", where=f"input {name!r}", value=str(error),
                        allowed=datatype) from None  # fmt: skip
