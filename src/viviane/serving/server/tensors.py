"""Tensors of the Open Inference Protocol, to the columns that a session takes.

A column is a tensor of its name: (B,) or (B, 1), or (B, n) of a vector or list. Lists of different lengths are padded
to (B, n), and an integer tensor "NAME:lengths", (B,), says how long each is. A Boolean tensor "NAME:missing", (B,),
marks missing raw values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from viviane.core.errors import suggest
from viviane.serving.columns import ColumnSpec
from viviane.serving.errors import RowProblem, RowsError
from viviane.serving.server.status import RequestError, Status, invalid

DATATYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_WIRE_TYPES: Final[dict[str, Any]] = {name: np.dtype(kind).newbyteorder("<") for name, kind in DATATYPES.items()}
BYTES: Final = "BYTES"
LENGTHS: Final = ":lengths"
MISSING: Final = ":missing"
_OF_COLUMN: Final = {"float32": "FP32", "float64": "FP64", "int32": "INT32", "int64": "INT64", "string": BYTES}
_LENGTH: Final = struct.Struct("<I")


class Tensor(NamedTuple):
    """A tensor of a request.

    Args:
        values: flat, of `datatype`; of BYTES an Arrow array of binary values.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Any


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in a model's metadata; -1 means any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


def input_specs(columns: Sequence[ColumnSpec]) -> list[TensorSpec]:
    """Return the tensors of columns, those that may be left out last.

    Example:
        >>> column = ColumnSpec("item", "int32", (-1, -1), raw=False)
        >>> [(one.name, one.shape) for one in input_specs([column])]
        [('item', (-1, -1)), ('item:lengths', (-1, 1))]
    """
    found = [TensorSpec(one.name, _OF_COLUMN[one.dtype], matrix_shape(one)) for one in columns]
    found += [TensorSpec(one.name + LENGTHS, "INT32", (-1, 1), True) for one in columns if one.is_ragged]
    found += [TensorSpec(one.name + MISSING, "BOOL", (-1, 1), True) for one in columns if one.nullable]
    return found


def output_specs(columns: Sequence[ColumnSpec]) -> list[TensorSpec]:
    """Return the tensors of predictions."""
    return [TensorSpec(one.name, _OF_COLUMN[one.dtype], matrix_shape(one)) for one in columns]


def matrix_shape(column: ColumnSpec) -> tuple[int, int]:
    """Return a column's shape with two dimensions."""
    return (-1, column.shape[1] if len(column.shape) > 1 else 1)


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return a shape of a request: at least one dimension, none negative.

    Raises:
        RequestError: it is none.
    """
    if not isinstance(shape, list | tuple) or not 1 <= len(shape) <= 8:
        raise invalid("a shape is a list of 1 to 8 numbers", where=f"input {name!r}", value=_shown(shape))
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**31:
            raise invalid("a shape has sizes from 0 to 2^31 - 1", where=f"input {name!r}", value=_shown(shape))
    return tuple(shape)


def from_binary(name: str, datatype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Tensor:
    """Read a tensor of the binary extension: numbers in little-endian order, or texts behind their 4-byte lengths.

    Raises:
        RequestError: the bytes are not as many as the shape needs.
    """
    count = math.prod(shape)
    if datatype == BYTES:
        return Tensor(name, BYTES, shape, _texts(name, count, data))
    kind = _WIRE_TYPES.get(datatype)
    if kind is None:
        kind = numpy_type(name, datatype)  # says which there are
    wanted = count * kind.itemsize
    if len(data) != wanted:
        what = "a tensor has another number of bytes than its shape"
        raise invalid(what, where=f"input {name!r}, {datatype} {list(shape)}", value=len(data), allowed=str(wanted))
    values = np.frombuffer(data, kind) if count else np.empty(0, kind)
    if datatype == "BOOL" and values.view(np.uint8).max(initial=0) > 1:
        raise invalid("a byte of a BOOL tensor is 0 or 1", where=f"input {name!r}")
    return Tensor(name, datatype, shape, values)


def numpy_type(name: str, datatype: Any) -> Any:
    """Return the type of a datatype's numbers.

    Raises:
        RequestError: there is no such datatype.
    """
    found = DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        allowed = ", ".join([*DATATYPES, BYTES])
        raise invalid("no such datatype", where=f"input {name!r}", value=_shown(datatype), allowed=allowed)
    return found


def _texts(name: str, count: int, data: bytes | memoryview) -> Any:
    size, at = len(data), 0
    offsets, pieces = [0], []
    if count * 4 > size:
        what = "a BYTES tensor has too few bytes: each element is a 4-byte length and its bytes"
        raise invalid(what, where=f"input {name!r}", value=size, allowed=f"at least {count * 4}")
    for row in range(count):
        if at + 4 > size:
            raise invalid("a BYTES tensor ends early", where=f"input {name!r}, element {row}", value=size)
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4
        if at + length > size:
            where, allowed = f"input {name!r}, element {row}", f"at most the {size - at} bytes that are left"
            raise invalid("an element is longer than its BYTES tensor", where=where, value=length, allowed=allowed)
        pieces.append(data[at : at + length])
        at += length
        offsets.append(offsets[-1] + length)
    if at != size:
        raise invalid("a BYTES tensor has bytes behind its last element", where=f"input {name!r}", value=size - at)
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32).tobytes()), pa.py_buffer(b"".join(pieces))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def text_tensor(name: str, shape: tuple[int, ...], values: Sequence[bytes | str]) -> Tensor:
    """Make a BYTES tensor of texts.

    Raises:
        RequestError: their number is not that of the shape.
    """
    _check_count(name, shape, len(values))
    try:
        return Tensor(name, BYTES, shape, pa.array(values, pa.binary()))
    except UnicodeEncodeError:
        raise invalid("half of a surrogate pair is no text", where=f"input {name!r}") from None


def number_tensor(name: str, datatype: str, shape: tuple[int, ...], values: NDArray[Any]) -> Tensor:
    """Make a tensor of flat numbers of its type."""
    _check_count(name, shape, len(values))
    return Tensor(name, datatype, shape, values)


def _check_count(name: str, shape: tuple[int, ...], count: int) -> None:
    if math.prod(shape) != count:
        where = f"input {name!r}, shape {list(shape)}"
        raise invalid("a tensor has another number of elements than its shape", where=where, value=count)


def columns_of_tensors(
    tensors: Sequence[Tensor], columns: Sequence[ColumnSpec], max_rows: int
) -> tuple[dict[str, Any], int]:
    """Return the columns of a request and its number of rows.

    Raises:
        RequestError: a tensor is missing, unknown, given twice, or of a type or shape that its column does not have.
        RowsError: bytes that are not UTF-8 text.
    """
    given: dict[str, Tensor] = {}
    specs = {one.name: one for one in columns}
    for tensor in tensors:
        if tensor.name in given:
            raise invalid("an input is given twice", value=tensor.name)
        if tensor.name not in specs and not _is_companion(tensor.name, specs):
            raise invalid("the model has no such input", value=tensor.name, fix=suggest(tensor.name, specs))
        given[tensor.name] = tensor
    missing = [name for name in specs if name not in given]
    if missing:
        raise invalid("an input is missing", value=missing[0], fix=f"send a tensor for each of: {', '.join(specs)}")
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) > 1:
        shown = {tensor.name: list(tensor.shape) for tensor in tensors}
        raise invalid("inputs differ in their number of rows", value=str(shown)[:1000])
    rows = sizes.pop()
    check_rows(rows, max_rows)
    return {name: _column(spec, given, rows) for name, spec in specs.items()}, rows


def check_rows(rows: int, max_rows: int) -> None:
    """Refuse a request with too many rows."""
    if rows > max_rows:
        what = "a request has too many rows"
        raise RequestError(Status.TOO_LARGE, what, value=rows, allowed=f"up to {max_rows}", fix="send several requests")


def _is_companion(name: str, specs: Mapping[str, ColumnSpec]) -> bool:
    base, _, kind = name.rpartition(":")
    spec = specs.get(base)
    if spec is None:
        return False
    return (f":{kind}" == LENGTHS and spec.is_ragged) or (f":{kind}" == MISSING and spec.nullable)


def _column(spec: ColumnSpec, given: Mapping[str, Tensor], rows: int) -> Any:
    tensor = given[spec.name]
    if (
        len(spec.shape) == 1
        and not (spec.raw or spec.nullable)
        and tensor.shape in ((rows,), (rows, 1))
        and tensor.datatype not in (BYTES, "FP16")
    ):
        return tensor.values  # what most requests consist of
    where = f"input {spec.name!r}"
    is_list = len(spec.shape) > 1
    per_row = math.prod(tensor.shape[1:])
    wanted = spec.shape[1] if is_list else 1
    if len(tensor.shape) > 2 or (is_list and len(tensor.shape) == 1) or (wanted >= 0 and per_row != wanted):
        shapes = f"[rows, {wanted if wanted >= 0 else 'n'}]" + ("" if is_list else " or [rows]")
        raise invalid("an input has another shape", where=where, value=list(tensor.shape), allowed=shapes)
    if tensor.datatype == BYTES and not spec.raw:
        raise invalid("an input of ids or numbers is sent as text", where=where, value=BYTES,
                      allowed=_OF_COLUMN[spec.dtype])  # fmt: skip
    values = tensor.values
    if tensor.datatype == BYTES:
        values = _decoded(values, spec.name, per_row)
    elif tensor.datatype == "FP16":
        values = values.astype(np.float32)
    lengths, absent = given.get(spec.name + LENGTHS), given.get(spec.name + MISSING)
    if spec.is_ragged:
        return _lists(spec.name, values, rows, per_row, lengths, absent)
    mask = None if absent is None else _mask(absent, rows)
    if is_list:
        if mask is not None:
            return _lists(spec.name, values, rows, per_row, None, absent)
        return values.reshape(rows, wanted) if isinstance(values, np.ndarray) else _uniform(values, rows, wanted)
    if mask is not None:
        plain = values if isinstance(values, np.ndarray) else values.to_numpy(zero_copy_only=False)
        return pa.array(plain, mask=mask)
    return values


def _decoded(values: Any, name: str, per_row: int) -> Any:
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        for place, value in enumerate(values):
            try:
                value.as_py().decode()
            except UnicodeDecodeError:
                row = place // max(per_row, 1)
                raise RowsError.of([RowProblem.of(row, name, value.as_py(), "not UTF-8 text")]) from None
        raise


def _uniform(values: Any, rows: int, length: int) -> Any:
    offsets: Any = pa.array(np.arange(rows + 1, dtype=np.int32) * length)
    return pa.ListArray.from_arrays(offsets, values if isinstance(values, pa.Array) else pa.array(values))


def _lists(name: str, values: Any, rows: int, width: int, lengths: Tensor | None, absent: Tensor | None) -> Any:
    counts = np.full(rows, width, np.int64)
    if lengths is not None:
        if math.prod(lengths.shape) != rows or np.asarray(lengths.values).dtype.kind not in "iu":
            raise invalid("lengths are one whole number a row", where=f"input {lengths.name!r}",
                          value=f"{lengths.datatype} {list(lengths.shape)}", allowed=f"INT32 [{rows}]")  # fmt: skip
        counts = np.asarray(lengths.values).astype(np.int64)
        wrong = np.flatnonzero((counts < 0) | (counts > width))
        if len(wrong):
            problem = f"not a length from 0 to {width}"
            raise RowsError.of([RowProblem.of(row, lengths.name, counts[row], problem) for row in wrong])
    mask = None if absent is None else _mask(absent, rows)
    kept = np.arange(width) < counts[:, None]
    flat = values if isinstance(values, pa.Array) else pa.array(values)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    inner: Any = flat.filter(pa.array(kept.reshape(-1))) if not kept.all() else flat
    # a missing offset is a missing list
    offsets: Any = pa.array(starts) if mask is None else pa.array(starts, mask=np.append(mask, False))
    return pa.ListArray.from_arrays(offsets, inner)


def _mask(tensor: Tensor, rows: int) -> NDArray[np.bool_]:
    if tensor.datatype != "BOOL" or math.prod(tensor.shape) != rows:
        raise invalid("missing values are marked by one BOOL a row", where=f"input {tensor.name!r}",
                      value=f"{tensor.datatype} {list(tensor.shape)}", allowed=f"BOOL [{rows}]")  # fmt: skip
    return np.asarray(tensor.values, np.bool_)


def _shown(value: Any) -> str:
    return repr(value)[:200]
