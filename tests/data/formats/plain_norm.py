"""Norm records with `struct`, a field at a time."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from viviane.ops.norm_records import NormLayout, NormRecords, Problem


def norm_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> NormRecords | Problem:
    """Take records apart."""
    content = data.tobytes()
    numbers, slots, at = [], [], start
    for record in range(count):
        found = _record(content, at, layout)
        if isinstance(found[0], int):
            return Problem(found[0], record, at)
        numbers.append(found[0])
        slots.append(found[1])
        at = found[2]
    return NormRecords(
        np.array(numbers, np.float32).reshape(count, layout.num_numbers),
        np.array([[len(one[s]) for one in slots] for s in range(layout.num_slots)], np.int32).reshape(
            layout.num_slots, count
        ),
        np.array([key for s in range(layout.num_slots) for one in slots for key in one[s]], np.int64),
        at,
    )


def skip_records(data: NDArray[np.uint8], start: int, count: int, layout: NormLayout) -> int | Problem:
    """Return the first byte after some records."""
    found = norm_records(data, start, count, layout)
    return found if isinstance(found, Problem) else found.end


def _record(content: bytes, at: int, layout: NormLayout) -> tuple[int | tuple[float, ...], list[tuple[int, ...]], int]:
    """Return numbers, keys of each slot, and the end; or the code of a problem in place of the numbers."""
    try:
        if layout.check_sum:
            (length,) = struct.unpack_from("<i", content, at)
            at += 4
            (check,) = struct.unpack_from("<B", content, at + length) if length >= 0 else (0,)
        first = at
        numbers = struct.unpack_from(f"<{layout.num_numbers}f", content, at)
        at += 4 * layout.num_numbers
        slots = []
        for _ in range(layout.num_slots):
            (nnz,) = struct.unpack_from("<i", content, at)
            if nnz < 0:
                return 4, [], at
            slots.append(struct.unpack_from(f"<{nnz}{'I' if layout.key_bytes == 4 else 'q'}", content, at + 4))
            at += 4 + nnz * layout.key_bytes
    except struct.error:
        return 1, [], at
    if layout.check_sum:
        if length != at - first:
            return 3, [], at
        if check != sum(content[first:at]) % 256:
            return 2, [], at
        at += 1
    return numbers, slots, at
