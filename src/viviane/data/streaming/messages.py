"""Decoding of messages: JSON objects or Arrow IPC streams, transformed by a fitted ETL if raw, and checked."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError, VivianeError
from viviane.core.json_files import MAX_JSON_DEPTH, parse_json
from viviane.data.checks import CellLocation
from viviane.data.columns import arrow_types, check_columns
from viviane.data.decode import decode_table
from viviane.data.packed_layout import PackedLayout
from viviane.data.row_buffer import RowBuffer, RowView
from viviane.schema import Schema

MessageKind = Literal["json", "arrow"]
_SCALARS: Final[dict[str, Any]] = {"float": pa.float64(), "int": pa.int64(), "string": pa.string(), "bool": pa.bool_()}
_PROBLEMS: Final = (VivianeError, pa.ArrowException, ValueError, TypeError, OSError, KeyError)
"""What a message raises that cannot be decoded; Arrow's errors are partly Python's own."""


class RowTransform(Protocol):
    """Interface of a fitted ETL: converts raw rows to rows of a schema."""

    @property
    def config(self) -> Any:
        """Names and types of the raw columns."""

    @property
    def schema(self) -> Schema:
        """Schema of the result."""

    def transform_table(self, raw: pa.Table) -> pa.Table:
        """Return every row, in order."""


class BadMessageError(DataError):
    """One of several messages cannot be decoded; `index` is its position."""

    def __init__(self, index: int, cause: str) -> None:
        super().__init__("a message cannot be decoded", value=cause)
        self.index, self.cause = index, cause


class MessageDecoder:
    """Decodes the values of messages.

    Args:
        kind: "json": each message is an object, one row; "arrow": each message is an Arrow IPC stream of any number of
            rows.
        schema: schema of the rows.
        etl: a fitted ETL, if messages contain raw rows.

    Example:
        >>> decoder = MessageDecoder("json", Schema(labels=[{"name": "y"}], dense=[{"name": "x"}]))
        >>> view, counts = decoder.decode([b'{"x": 0.5, "y": 1}', b'{"y": 0, "x": 2}'])
        >>> view.dense[0][1].tolist(), counts.tolist()
        ([[0.5], [2.0]], [1, 1])
    """

    def __init__(self, kind: MessageKind, schema: Schema, etl: RowTransform | None = None) -> None:
        if kind not in ("json", "arrow"):
            raise ConfigError("unknown kind of messages", value=kind, allowed="json, arrow")
        self.kind, self.schema, self.etl = kind, schema, etl
        self._layout = PackedLayout(schema)
        types = arrow_types(schema)
        self._types = pa.schema(list(types.items())) if etl is None else _raw_types(etl.config.input.columns)
        self._json_types = pa.schema([(one.name, _in_json(one.type)) for one in self._types])

    def decode(self, values: Sequence[bytes | None]) -> tuple[RowView, NDArray[np.int64]]:
        """Return the rows of messages, concatenated, and the number of rows of each message.

        Raises:
            BadMessageError: a message cannot be decoded; names the first one.
        """
        try:
            return self._decode(values)
        except _PROBLEMS as error:
            if len(values) == 1:
                raise BadMessageError(0, str(error)) from error
            for index, value in enumerate(values):
                try:
                    self._decode([value])
                except _PROBLEMS as cause:
                    raise BadMessageError(index, str(cause)) from cause
            raise

    def empty(self) -> RowView:
        """Return a view without rows."""
        buffer = RowBuffer(self._layout, 0, 1)
        table = pa.schema(list(arrow_types(self.schema).items())).empty_table()
        decode_table(table, lambda name: CellLocation("no message", 0, 0, name, "message"), self.schema, buffer, 0, 0)
        return buffer.finish()

    def _decode(self, values: Sequence[bytes | None]) -> tuple[RowView, NDArray[np.int64]]:
        if any(not value for value in values):
            raise DataError("the message is empty")
        present = [value for value in values if value]
        tables, counts = self._json(present) if self.kind == "json" else self._arrow(present)
        if self.etl is not None:
            tables = [self.etl.transform_table(one) for one in tables]
        table = pa.concat_tables(tables)
        check_columns(table.schema, self.schema, "the message")
        table = table.select(self.schema.column_names)
        buffer = RowBuffer(self._layout, table.num_rows, 1)
        decode_table(table, lambda name: CellLocation("the message", 0, 0, name, "message"), self.schema, buffer, 0, 0)
        return buffer.finish(), counts

    def _json(self, values: list[bytes]) -> tuple[list[pa.Table], NDArray[np.int64]]:
        from pyarrow import json

        for value in values:
            _check_object(value)
        # a newline inside JSON is white space: in strings it is escaped
        lines = b"\n".join(value.replace(b"\n", b" ").replace(b"\r", b" ") for value in values)
        options = json.ParseOptions(explicit_schema=self._json_types, unexpected_field_behavior="ignore")
        reading = json.ReadOptions(use_threads=False, block_size=max(1 << 20, 2 * len(lines)))
        table = json.read_json(io.BytesIO(lines), read_options=reading, parse_options=options)
        if table.num_rows != len(values):
            raise DataError("a message is not one JSON object", value=f"{table.num_rows} objects in {len(values)}")
        return [table], np.ones(len(values), np.int64)

    def _arrow(self, values: list[bytes]) -> tuple[list[pa.Table], NDArray[np.int64]]:
        tables = []
        for value in values:
            with pa.ipc.open_stream(value) as stream:
                table = stream.read_all()
            table.validate(full=True)  # offsets of lists and texts, which the kernels trust
            tables.append(table if self.etl is not None else self._chosen(table))
        counts = np.array([table.num_rows for table in tables], np.int64)
        # An ETL takes messages of one form together; producers may change it between two messages.
        alike = [list(group) for _, group in groupby(tables, key=lambda one: one.schema)]
        return [pa.concat_tables(group) for group in alike], counts

    def _chosen(self, table: pa.Table) -> pa.Table:
        """Return the columns of the schema in its types."""
        for name in self.schema.column_names:
            count = len(table.schema.get_all_field_indices(name))
            if count != 1:
                raise DataError("a column is missing" if not count else "a column occurs twice", value=name)
        return table.select(self.schema.column_names).cast(self._types)


def _check_object(value: bytes) -> None:
    """Refuse what is no object, or nested deeply: Arrow's parser ends the process at `null` and at many brackets."""
    body = value.strip(b" \t\r\n")
    if body[:1] != b"{" or body[-1:] != b"}":
        raise DataError("a message is not one JSON object", value=ascii(body[:40]))
    if body.count(b"{") + body.count(b"[") > MAX_JSON_DEPTH:
        parse_json(body, where="the message", error=DataError)


def _in_json(kind: Any) -> Any:
    """Return a type without fixed list lengths, which JSON does not have; lengths are checked later."""
    return pa.list_(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind


def _raw_types(columns: Sequence[Any]) -> pa.Schema:
    """Return the types of raw columns in JSON; columns of lists as text stay text."""
    fields = []
    for column in columns:
        kind = _SCALARS.get(column.type, pa.string())
        listed = column.is_list and column.separator is None
        fields.append(pa.field(column.name, pa.list_(kind) if listed else pa.string() if column.is_list else kind))
    return pa.schema(fields)
