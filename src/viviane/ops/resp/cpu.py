"""The parser of replies on the CPU."""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

from numba import njit

from viviane.ops.crc32c.cpu import update
from viviane.ops.native.memory import copy_bytes, int32_at, int64_at, uint8_at

_PARSED, _MORE, _OTHER = 0, 1, 2
_DOLLAR, _MINUS, _ONE, _ZERO, _NINE, _RETURN, _LINE = 36, 45, 49, 48, 57, 13, 10


@njit(forceinline=True)
def _take(row, row_bytes, key, target):
    """Copy a row to an address if its checksum is right; return whether it was."""
    sum_ = update(row, row_bytes, update(key, 8, 0))
    if (int32_at(row + row_bytes)[0] ^ sum_) & 0xFFFFFFFF != 0:
        return False
    copy_bytes(target, row, row_bytes)
    return True


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def parse(data, end, count, keys, targets, out, stride, row_bytes, found, place):
    """Parse elements from place[0] on; place[1] counts them, place[2] those damaged. See `RowReplies.parse`."""
    text = uint8_at(data)
    at, item = int64_at(place)[0], int64_at(place)[1]
    sealed_bytes = row_bytes + 4
    state = _PARSED
    while item < count:
        start = at
        if end - at < 5:
            state = _MORE
            break
        if text[at] != _DOLLAR:
            state = _OTHER
            break
        at += 1
        if text[at] == _MINUS:
            if text[at + 1] != _ONE or text[at + 2] != _RETURN or text[at + 3] != _LINE:
                state = _OTHER
                at = start
                break
            uint8_at(found)[int64_at(targets)[item]] = 0
            at += 4
            item += 1
            continue
        length = 0
        digits = 0
        while at < end and _ZERO <= text[at] <= _NINE and digits < 9:
            length = 10 * length + text[at] - _ZERO
            at += 1
            digits += 1
        if end - at < 2:
            at, state = start, _MORE
            break
        if text[at] != _RETURN or text[at + 1] != _LINE or length != sealed_bytes:
            at, state = start, _OTHER
            break
        at += 2
        if end - at < length + 2:
            at, state = start, _MORE
            break
        if text[at + length] != _RETURN or text[at + length + 1] != _LINE:
            at, state = start, _OTHER
            break
        target = int64_at(targets)[item]
        right = _take(data + at, row_bytes, keys + 8 * item, out + target * stride)
        uint8_at(found)[target] = right
        int64_at(place)[2] += not right
        at += length + 2
        item += 1
    int64_at(place)[0] = at
    int64_at(place)[1] = item
    return state


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def seal(keys, rows, count, row_bytes, out):
    """Write each row and, behind it, the CRC-32C of its key and itself."""
    for i in range(count):
        row = out + i * (row_bytes + 4)
        copy_bytes(row, rows + i * row_bytes, row_bytes)
        int32_at(row + row_bytes)[0] = update(row, row_bytes, update(keys + 8 * i, 8, 0))
