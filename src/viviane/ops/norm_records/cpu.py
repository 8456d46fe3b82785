"""Norm records in compiled loops: one pass finds the offsets, a second copies the values.

Numbers are loaded from addresses without checks: the first pass compares every place with the size before it is read.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from viviane.ops.norm_records.layout import NormLayout, NormRecords, Problem


def norm_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> NormRecords | Problem:
    """Take records apart."""
    data = np.ascontiguousarray(data)
    lengths = np.empty((layout.num_slots, count), np.int32)
    firsts = np.empty(count, np.int64)
    end = _scan(data, start, count, layout, firsts, lengths)
    if isinstance(end, Problem):
        return end
    numbers = np.empty((count, layout.num_numbers), np.float32)
    per_slot = lengths.sum(axis=1, dtype=np.int64)
    keys = np.empty(int(per_slot.sum()), np.int64)
    next_key = np.cumsum(per_slot) - per_slot
    copy_out(data.ctypes.data, firsts, lengths, layout.key_bytes, numbers.view(np.int32), keys, next_key)
    return NormRecords(numbers, lengths, keys, end)


def skip_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> int | Problem:
    """Return the first byte after some records."""
    return _scan(
        np.ascontiguousarray(data),
        start,
        count,
        layout,
        np.empty(0, np.int64),
        np.empty((layout.num_slots, 0), np.int32),
    )


def _scan(
    data: NDArray[np.uint8],
    start: int,
    count: int,
    layout: NormLayout,
    firsts: NDArray[np.int64],
    lengths: NDArray[np.int32],
) -> int | Problem:
    code, record, end = scan(
        data.ctypes.data,
        len(data),
        start,
        count,
        layout.num_numbers,
        layout.num_slots,
        layout.key_bytes,
        layout.check_sum,
        firsts,
        lengths,
    )
    return Problem(int(code), int(record), int(end)) if code else int(end)


def _load(bits: int) -> Any:
    def load(typing: Any, address: types.Type) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.inttoptr(args[0], ir.IntType(bits).as_pointer())
            return builder.load(place, align=1)

        return getattr(types, f"uint{bits}")(types.int64), build

    return load


# An unsigned number at an address that is no multiple of its size.
byte_at: Any = intrinsic(_load(8))
whole_at: Any = intrinsic(_load(32))
long_at: Any = intrinsic(_load(64))


@numba.njit(nogil=True, cache=True)
def scan(  # noqa: PLR0911, PLR0912 - one loop over bytes; each return is another damage
    data: int, size: int, start: int, count: int, num_numbers: int, num_slots: int, key_bytes: int, checked: bool,
    firsts: Any, lengths: Any,
) -> Any:  # fmt: skip
    """Find the records; return the code of a problem or 0, the record, and the byte offset of it or of the end."""
    keep = len(firsts) > 0
    at = start
    for record in range(count):
        begin = at
        length = -1
        if checked:
            if at + 4 > size:
                return 1, record, begin
            length = numba.int64(numba.int32(whole_at(data + at)))
            at += 4
        first = at
        at += 4 * num_numbers
        for slot in range(num_slots):
            if at + 4 > size:
                return 1, record, begin
            nnz = numba.int64(numba.int32(whole_at(data + at)))
            if nnz < 0:
                return 4, record, begin
            if keep:
                lengths[slot, record] = nnz
            at += 4 + nnz * key_bytes
            if at > size:
                return 1, record, begin
        if keep:
            firsts[record] = first
        if at + checked > size:
            return 1, record, begin
        if checked:
            if length != at - first:
                return 3, record, begin
            total = numba.uint32(0)
            for byte in range(first, at):
                total += numba.uint32(byte_at(data + byte))
            if numba.uint32(byte_at(data + at)) != total & numba.uint32(255):
                return 2, record, begin
            at += 1
    return 0, count, at


@numba.njit(nogil=True, cache=True)
def copy_out(data: int, firsts: Any, lengths: Any, key_bytes: int, numbers: Any, keys: Any, next_key: Any) -> None:
    """Copy the bits of numbers, and keys slot by slot; `next_key` is where each slot's next key goes."""
    for record in range(len(firsts)):
        at = firsts[record]
        for i in range(numbers.shape[1]):
            numbers[record, i] = numba.int32(whole_at(data + at))
            at += 4
        for slot in range(lengths.shape[0]):
            at += 4
            to = next_key[slot]
            for _ in range(lengths[slot, record]):
                keys[to] = numba.int64(long_at(data + at)) if key_bytes == 8 else numba.int64(whole_at(data + at))
                to += 1
                at += key_bytes
            next_key[slot] = to


def pack_records(
    numbers: NDArray[np.float32], lengths: NDArray[np.int32], keys: NDArray[np.int64], layout: NormLayout
) -> NDArray[np.uint8]:
    """Put records together."""
    around = 5 if layout.check_sum else 0
    payload = 4 * (layout.num_numbers + layout.num_slots) + lengths.sum(axis=0, dtype=np.int64) * layout.key_bytes
    out = np.empty(int((payload + around).sum()), np.uint8)
    per_slot = lengths.sum(axis=1, dtype=np.int64)
    next_key = np.cumsum(per_slot) - per_slot
    put_together(
        np.ascontiguousarray(numbers).view(np.uint32), lengths, keys, layout.key_bytes, layout.check_sum, payload,
        next_key, out,
    )  # fmt: skip
    return out


@numba.njit(nogil=True, cache=True)
def put(out: Any, at: int, value: Any, size: int) -> None:
    """Write a whole number, little endian, from any byte on."""
    for byte in range(size):
        out[at + byte] = numba.uint8((value >> numba.uint64(8 * byte)) & numba.uint64(255))


@numba.njit(nogil=True, cache=True)
def put_together(
    numbers: Any, lengths: Any, keys: Any, key_bytes: int, checked: bool, payload: Any, next_key: Any, out: Any
) -> None:
    """Write record after record."""
    at = 0
    for record in range(numbers.shape[0]):
        if checked:
            put(out, at, numba.uint64(payload[record]), 4)
            at += 4
        first = at
        for i in range(numbers.shape[1]):
            put(out, at, numba.uint64(numbers[record, i]), 4)
            at += 4
        for slot in range(lengths.shape[0]):
            put(out, at, numba.uint64(lengths[slot, record]), 4)
            at += 4
            start = next_key[slot]
            for k in range(lengths[slot, record]):
                put(out, at, numba.uint64(keys[start + k]), key_bytes)
                at += key_bytes
            next_key[slot] = start + lengths[slot, record]
        if checked:
            total = numba.uint32(0)
            for byte in range(first, at):
                total += numba.uint32(out[byte])
            out[at] = numba.uint8(total & numba.uint32(255))
            at += 1
