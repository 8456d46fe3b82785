"""Cells of raw columns to the types of the config; each cell that cannot be converted is named, not guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.etl.columns import InputColumn

SCALARS: Final[dict[str, pa.DataType]] = {
    "float": pa.float64(),
    "int": pa.int64(),
    "string": pa.string(),
    "hex": pa.uint64(),
    "timestamp": pa.timestamp("us"),
    "bool": pa.int64(),
}
_WANTED: Final = {
    "float": "a finite number",
    "int": "a whole number of 64 bits",
    "string": "UTF-8 text",
    "hex": "1 to 16 hexadecimal digits",
    "timestamp": "a date and time such as 2014-05-31 23:59:59 or 2014-05-31T23:59:59+02:00",
    "bool": "true or false, t or f, yes or no, y or n, 1 or 0",
}
_BOOLEANS: Final = ("false", "f", "no", "n", "0", "true", "t", "yes", "y", "1")
_NUM_FALSE: Final = 5
_HIGH_HALF, _LETTER, _ZERO, _SIX, _SIXTEEN = (  # the same byte eight times, for a text of eight digits as one word
    np.uint64(byte * 0x0101010101010101) for byte in (0xF0, 0x40, ord("0"), 6, 16)
)
_HALVINGS: Final = tuple(
    (np.uint64(shift), np.uint64(mask))
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF))
)
_MINUS_ZERO: Final = -(2**63)  # the bits of -0.0, read as a whole number
_TO_LETTER: Final = np.uint64(ord("a") - ord("9") - 1)


@dataclass(frozen=True)
class BadCell:
    """A row that cannot be used, by its position in the table, and the reason."""

    row: int
    column: str
    problem: str
    value: str


def shown(cell: Any) -> str:
    """Return a cell as text for a message: bytes that are no UTF-8 and times beyond Python's too."""
    try:
        value = cell.as_py()
        return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        if isinstance(cell, (pa.StringScalar, pa.LargeStringScalar)):
            return cell.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
        return str([shown(one) for one in cell.values])
    except (ValueError, OverflowError):
        return str(cell.value)


def staged_type(column: InputColumn) -> pa.DataType:
    """The Arrow type that a raw column has from staging on."""
    scalar = SCALARS[column.type]
    return pa.list_(scalar) if column.is_list else scalar


def convert(array: Any, column: InputColumn, missing: tuple[str, ...]) -> tuple[Any, list[BadCell]]:
    """Convert one column of text, numbers or lists to its staged type.

    Returns:
        The column, missing where a cell is bad, and the bad cells.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    if pa.types.is_null(array.type):  # every value is missing
        return array.cast(staged_type(column)), []
    if not column.is_list:
        result, bad = _scalars(array, column.type)
        return result, [BadCell(row, column.name, f"not {_WANTED[column.type]}", shown(array[row])) for row in bad]
    if column.separator is not None and _is_text(array.type):
        array = pc.split_pattern(array.cast(pa.string()), pattern=column.separator)
    offsets, flat = list_parts(array)
    elements = flat
    if _is_text(flat.type) and missing:
        elements = pc.if_else(pc.is_in(flat, value_set=pa.array(missing, flat.type)), pa.scalar(None, flat.type), flat)
    values, bad = _scalars(elements, column.type)
    rows = np.unique(np.searchsorted(offsets, np.array(bad, np.int64), side="right") - 1)
    problem = f"a list element is not {_WANTED[column.type]}"
    cells = [BadCell(int(row), column.name, problem, shown(array[int(row)])) for row in rows]
    return make_list(offsets, values, pc.is_null(array)), cells


def list_parts(array: Any) -> tuple[NDArray[np.int64], Any]:
    """Return offsets from 0, (B + 1,), and the flat values of a list array; a missing list counts as empty."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pc.list_flatten(array)


def make_list(offsets: NDArray[np.int64], values: Any, null: Any = None) -> Any:
    """Build a list array from offsets and flat values; `null` marks missing lists."""
    mask = null if null is not None and pc.any(null).as_py() else None
    bounds: Any = pa.array(offsets.astype(np.int32))
    return pa.ListArray.from_arrays(bounds, values, mask=mask)


def cast_cells(array: Any, target: pa.DataType) -> tuple[Any, list[int]]:
    """Cast without loss; cells that refuse become missing, found by halving, and their positions are returned."""
    try:
        return array.cast(target), []
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(array) == 1:
            return pa.array([None], target), [0]
    half = len(array) // 2
    left, bad_left = cast_cells(array.slice(0, half), target)
    right, bad_right = cast_cells(array.slice(half), target)
    return pa.concat_arrays([left, right]), bad_left + [half + row for row in bad_right]


def _scalars(array: Any, kind: str) -> tuple[Any, list[int]]:
    if kind in ("int", "bool") and pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    if kind == "hex":
        return _hex(array)
    if kind == "bool":
        return _boolean(array)
    bad: list[int] = []
    if _is_text(array.type) and kind != "string":
        text, bad = cast_cells(array, pa.string())
        array = pc.ascii_trim_whitespace(text)
        if kind == "timestamp":  # times without a zone are taken as they are: so are those with UTC
            array = pc.replace_substring_regex(array, r"([0-9])(Z| UTC)$", r"\1")
            array, more = _times(array)
            bad = sorted({*bad, *more})
    if array.type != SCALARS[kind]:
        array, more = cast_cells(array, SCALARS[kind])
        bad = sorted({*bad, *more})
    if kind == "float" and len(array):
        array, infinite = _finite(array)
        bad = sorted({*bad, *infinite})
    return array, bad


def _boolean(array: Any) -> tuple[Any, list[int]]:
    """Turn truth values into 0 and 1."""
    bad: list[int] = []
    if _is_text(array.type):
        array, bad = cast_cells(array, pa.string())
        words = pa.array(_BOOLEANS)  # made here: as a constant it would load pandas with this module
        places = pc.index_in(pc.utf8_lower(pc.ascii_trim_whitespace(array)), value_set=words, skip_nulls=True)
        is_true: Any = pc.greater_equal(places, pa.scalar(_NUM_FALSE, pa.int32()))
        found = is_true.cast(pa.int64())
    else:
        whole, bad = cast_cells(array, pa.int64())
        found = pc.if_else(pc.is_in(whole, value_set=pa.array([0, 1])), whole, pa.scalar(None, pa.int64()))
        array = whole
    wrong = pc.and_(pc.is_null(found), pc.is_valid(array)).to_numpy(zero_copy_only=False)
    return found, sorted({*bad, *np.flatnonzero(wrong).tolist()})


def _times(text: Any) -> tuple[Any, list[int]]:
    """Turn times with an offset, such as +01:00, into UTC, beside times without one."""
    offset = pc.fill_null(pc.match_substring_regex(text, r":[0-9.]+[+-][0-9]{2}(:?[0-9]{2})?$"), False)
    positions = np.flatnonzero(offset.to_numpy(zero_copy_only=False))
    if len(positions) == 0:
        return text, []
    zoned, bad_zoned = cast_cells(text.filter(offset), pa.timestamp("us", "UTC"))
    plain, bad = cast_cells(pc.if_else(offset, pa.scalar(None, pa.string()), text), SCALARS["timestamp"])
    joined = pc.replace_with_mask(plain, offset, zoned.cast(SCALARS["timestamp"]))
    return joined, sorted({*bad, *positions[bad_zoned].tolist()})


def _finite(array: Any) -> tuple[Any, list[int]]:
    """Turn NaN into missing and name infinite cells; -0.0 becomes 0.0, one value for one number."""
    if _is_plain(np.frombuffer(array.buffers()[1], np.float64, len(array), 8 * array.offset)):
        return array, []
    numbers = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False)
    nan, infinite = np.isnan(numbers), np.isinf(numbers)
    mask = pc.is_null(array).to_numpy(zero_copy_only=False) | nan | infinite
    return pa.array(numbers + 0.0, mask=mask), np.flatnonzero(infinite).tolist()


def _is_plain(numbers: NDArray[np.float64]) -> bool:
    """Whether numbers are finite and none is -0.0; what lies under missing values may make this False."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = numbers.sum()
    return bool(np.isfinite(total)) and bool(numbers.view(np.int64).min() != _MINUS_ZERO)


def _hex(array: Any) -> tuple[Any, list[int]]:
    if pa.types.is_integer(array.type):
        return cast_cells(array, pa.uint64())
    if pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        array = array.cast(pa.string())
    fast = _eight_digits(array)
    if fast is not None:
        return fast, []
    text, bad = cast_cells(array, pa.string())
    good = pc.match_substring_regex(text, r"^[0-9a-fA-F]{1,16}$")
    wrong = np.flatnonzero(pc.fill_null(pc.invert(good), False).to_numpy(zero_copy_only=False)).tolist()
    prefixed = pc.binary_join_element_wise(pa.scalar("0x"), pc.if_else(good, text, pa.scalar(None, pa.string())), "")
    return prefixed.cast(pa.uint64()), sorted({*bad, *wrong})


def _eight_digits(array: Any) -> Any:
    """Convert when every value has eight digits, as in Criteo: all digits of a value at once in one 64-bit word."""
    _, offset_buffer, data_buffer = array.buffers()
    if len(array) == 0 or data_buffer is None:
        return None
    offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    present = np.diff(offsets) == 8
    num_bytes = int(offsets[-1] - offsets[0])
    num_present = int(np.count_nonzero(present))
    if num_present != len(array) - array.null_count or num_bytes != 8 * num_present:
        return None
    text = np.frombuffer(data_buffer, np.uint64, num_present, int(offsets[0]))
    # Three arrays are used again and again: they stay in the cache. In each byte: a letter becomes lower case, less 39
    # it follows "9", and a digit less "0" is 0 to 15.
    letter = text & _LETTER
    digits = letter >> np.uint64(1)
    digits |= text
    spare = letter >> np.uint64(6)
    spare *= _TO_LETTER
    digits -= spare
    digits ^= _ZERO
    np.add(digits, _SIX, out=spare)
    letter >>= np.uint64(2)
    spare ^= letter
    spare &= _SIXTEEN  # above 9 but no letter, or the reverse
    np.bitwise_and(digits, _HIGH_HALF, out=letter)
    spare |= letter
    if np.bitwise_or.reduce(spare):
        return None
    word = digits.byteswap(inplace=True)  # 0x0h0g0f0e0d0c0b0a read as big-endian: the first digit is the highest
    for shift, mask in _HALVINGS:
        np.right_shift(word, shift, out=spare)
        word |= spare
        word &= mask
    stored: Any = pa.allocate_buffer(8 * len(array))  # Arrow's allocator keeps it for the next block
    full = np.frombuffer(stored, np.uint64)
    if num_present == len(array):
        full[:] = word
        return pa.Array.from_buffers(pa.uint64(), len(full), [None, stored])
    full[:] = 0
    full[present] = word
    if array.offset:
        return pa.array(full, mask=~present)
    return pa.Array.from_buffers(pa.uint64(), len(full), [array.buffers()[0], stored], array.null_count)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )
