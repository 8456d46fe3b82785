"""Encoded rows with all dense numbers in one matrix and all one-hot ids in another.

A request of many columns costs a server some microseconds for each of them, however few rows it has. As matrices,
"dense" (B, N) and "one_hot" (B, F), it has two, and one for each bag. Shapes: B rows, N dense numbers, F one-hot
columns, in the order of the schema.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from viviane.core.errors import ConfigError, DataError
from viviane.core.tensors import tensor_array
from viviane.schema import Schema
from viviane.serving.columns import ColumnSpec, encoded_columns
from viviane.serving.errors import RowsError
from viviane.serving.frames import columns_of

DENSE: Final = "dense"
ONE_HOT: Final = "one_hot"


def matrix_columns(schema: Schema) -> tuple[ColumnSpec, ...]:
    """Describe the matrices, and the bags beside them.

    Raises:
        ConfigError: a bag has the name of a matrix.

    Example:
        >>> ids = [{"name": name, "num_ids": 9} for name in "cd"]
        >>> schema = Schema(dense=[{"name": "x"}], categorical=ids)
        >>> [(one.name, one.shape, one.columns) for one in matrix_columns(schema)]
        [('dense', (-1, 1), ('x',)), ('one_hot', (-1, 2), ('c', 'd'))]
    """
    bags = {name for one in schema.bags for name in (one.name, one.weights) if name is not None}
    for name in (DENSE, ONE_HOT):
        if name in bags:
            raise ConfigError("a bag has the name of a matrix", where="session", value=f'"rows": "matrices", {name!r}',
                              fix="rename the column, or leave rows out")  # fmt: skip
    found = []
    if schema.dense:
        names = tuple(one.name for one in schema.dense)
        found.append(ColumnSpec(DENSE, "float32", (-1, schema.num_dense), raw=False, columns=names))
    if schema.one_hot:
        dtype: Any = "int64" if any(one.dtype == "int64" for one in schema.one_hot) else "int32"
        most = min((one.num_ids for one in schema.one_hot if one.num_ids is not None), default=None)
        names = tuple(one.name for one in schema.one_hot)
        found.append(ColumnSpec(ONE_HOT, dtype, (-1, len(names)), raw=False, num_ids=most, columns=names))
    return (*found, *(one for one in encoded_columns(schema) if one.name in bags))


def columns_of_matrices(rows: Any, schema: Schema) -> dict[str, Any]:
    """Return the columns of a request of matrices.

    Args:
        rows: in a form of `viviane.serving.frames.columns_of`.

    Raises:
        SchemaError: a matrix is missing. DataError: it is none, or of another shape. RowsError: a row lacks one.
    """
    wanted = [one.name for one in matrix_columns(schema)]
    found, size, problems = columns_of(rows, wanted)
    if problems:
        raise RowsError.of(problems)
    columns = {name: values for name, values in found.items() if name not in (DENSE, ONE_HOT)}
    if schema.dense:
        numbers, place = _matrix(found[DENSE], DENSE, (size, schema.num_dense)), 0
        for one in schema.dense:
            columns[one.name] = numbers[:, place] if one.dim == 1 else numbers[:, place : place + one.dim]
            place += one.dim
    if schema.one_hot:
        ids = _matrix(found[ONE_HOT], ONE_HOT, (size, len(schema.one_hot)))
        columns |= {one.name: ids[:, place] for place, one in enumerate(schema.one_hot)}
    return columns


def _matrix(values: Any, name: str, shape: tuple[int, int]) -> NDArray[Any]:
    where, allowed = f"column {name!r}", f"numbers, {shape}"
    try:
        if isinstance(values, torch.Tensor):
            array = tensor_array(values, where)
        else:
            array = np.asarray(values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else values)
    except (ValueError, TypeError, OverflowError) as error:  # rows of different lengths
        raise DataError("a matrix cannot be read", where=where, value=str(error)[:100], allowed=allowed) from error
    if array.shape != shape and not (array.size == 0 and shape[0] == 0):
        raise DataError("a matrix has another shape", where=where, value=array.shape, allowed=allowed)
    return array.reshape(shape)
