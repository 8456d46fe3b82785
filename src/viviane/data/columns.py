"""The Arrow type of every column, and the check of a file's columns before rows are read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from viviane.core.errors import SchemaError, suggest
from viviane.schema import CategoricalColumn, DenseColumn, Schema

_SCALARS: dict[str, Any] = {
    "float32": pa.float32(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
}


def arrow_types(schema: Schema) -> dict[str, Any]:
    """Return the Arrow type that a writer gives to each column of a schema, in the schema's order.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> {name: str(type) for name, type in arrow_types(schema).items()}
        {'y': 'float', 'c': 'int32'}
    """
    types: dict[str, Any] = {}
    for column in schema.columns:
        scalar = _SCALARS[column.dtype]
        if isinstance(column, DenseColumn) and column.dim > 1:
            types[column.name] = pa.list_(scalar, column.dim)
        elif isinstance(column, CategoricalColumn) and column.kind != "one_hot":
            types[column.name] = pa.list_(scalar)
        else:
            types[column.name] = scalar
    for bag in schema.bags:
        if bag.weights is not None:
            types[bag.weights] = pa.list_(pa.float32())
    if schema.sample_weight is not None:
        types[schema.sample_weight] = pa.float32()
    return types


def same_type(found: Any, wanted: Any) -> bool:
    """Return whether a column of type `found` can be read as `wanted`: equal types, or lists of equal values."""
    if is_list(wanted):
        fixed = pa.types.is_fixed_size_list(found) and pa.types.is_fixed_size_list(wanted)
        return (
            is_list(found)
            and found.value_type == wanted.value_type
            and (not fixed or found.list_size == wanted.list_size)
        )
    return bool(found == wanted)


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list of any kind."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def check_columns(found: pa.Schema, schema: Schema, where: str) -> None:
    """Compare a file's columns with the schema.

    Raises:
        SchemaError: a column is missing, occurs twice, is unknown, or has another type; names file and column.
    """
    types = arrow_types(schema)
    names = found.names
    for name in names:
        if names.count(name) > 1:
            raise SchemaError("a column occurs twice in the file", where=where, value=name)
        if name not in types and name not in schema.ignored:
            raise SchemaError(
                "the file has a column that is not in the schema",
                where=where,
                value=name,
                fix=f"{suggest(name, types)}; or add it to the schema's `ignored` columns",
            )
    for name, wanted in types.items():
        if name not in names:
            raise SchemaError(
                "a column of the schema is missing in the file", where=where, value=name, fix=suggest(name, names)
            )
        kind = found.field(name).type
        if not same_type(kind, wanted):
            raise SchemaError(
                "the type of a column differs from the schema",
                where=f"{where}, column {name!r}",
                value=str(kind),
                allowed=str(wanted),
                fix="write the data set with `viviane etl` or viviane.data.write_dataset, or correct schema.json",
            )
