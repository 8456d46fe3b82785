"""Rows as the bytes of a Norm file.

Shapes: R rows, P numbers of a row (labels, then dense), S slots. A row has 4 (P + S) + key_bytes * nnz bytes, and with
check sums its length before it and one byte after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.data.block import Jagged, View
from viviane.data.formats.slots import Slot
from viviane.ops.norm_records import NormLayout


def pack(view: View, rows: int, slots: Sequence[Slot], layout: NormLayout) -> bytes:
    """Return rows as records.

    Example:
        >>> from viviane.data.formats.slots import Slot
        >>> from viviane.schema import CategoricalColumn
        >>> slots = [Slot(CategoricalColumn(name="c", num_ids=9), shift=100)]
        >>> ids, nothing = np.array([[3]], np.int32), np.zeros((1, 0), np.float32)
        >>> view = View(((0, np.ones((1, 1), np.float32)),), ((0, nothing),), ((0, ids),), None, {})
        >>> pack(view, 1, slots, NormLayout(num_numbers=1, num_slots=1, key_bytes=4, check_sum=False)).hex(" ", 4)
        '0000803f 01000000 67000000'
    """
    bags = [_bag(view, slots, i, rows) for i in range(len(slots))]
    lengths = [bag.offsets[1:] - bag.offsets[:-1] for bag in bags]
    payload = np.full(rows, 4 * (layout.num_numbers + layout.num_slots), np.int64)
    for length in lengths:
        payload += length * layout.key_bytes
    around = 5 if layout.check_sum else 0
    ends = np.cumsum(payload + around)
    out = np.zeros(int(ends[-1]) if rows else 0, np.uint8)
    at = ends - payload - around
    if layout.check_sum:
        _put(out, at, payload.astype("<i4"))
        at = at + 4
    numbers = np.concatenate([view.labels[0][1], view.dense[0][1]], axis=1)
    _put(out, at, numbers.astype("<f4"))
    at = at + 4 * layout.num_numbers
    kind = "<u4" if layout.key_bytes == 4 else "<i8"
    for slot, bag, length in zip(slots, bags, lengths, strict=True):
        _put(out, at, length.astype("<i4"))
        # where each key goes: after the length of its own slot, and after the keys before it
        first = np.repeat(at + 4 - bag.offsets[:-1] * layout.key_bytes, length)
        keys = bag.values.astype(np.int64) + slot.shift
        _put(out, first + np.arange(len(keys)) * layout.key_bytes, keys.astype(kind))
        at = at + 4 + length * layout.key_bytes
    if layout.check_sum:
        _check_sums(out, ends, payload)
    return out.tobytes()


def _bag(view: View, slots: Sequence[Slot], index: int, rows: int) -> Jagged:
    column = slots[index].column
    if column.kind != "one_hot":
        bag = view.bags[column.name]
        return Jagged(bag.values, bag.offsets.astype(np.int64))
    position = sum(slot.column.kind == "one_hot" for slot in slots[:index])
    return Jagged(view.one_hot[0][1][:, position], np.arange(rows + 1, dtype=np.int64))


def _put(out: NDArray[np.uint8], at: NDArray[np.int64], values: NDArray[Any]) -> None:
    """Put values, (n,) or (n, k), at bytes of `out`, one byte of all of them at a time."""
    content = np.ascontiguousarray(values).view(np.uint8).reshape(len(at), -1)
    for byte in range(content.shape[1]):
        out[at + byte] = content[:, byte]


def _check_sums(out: NDArray[np.uint8], ends: NDArray[np.int64], payload: NDArray[np.int64]) -> None:
    if len(ends):
        # the check sums' own bytes are still 0; from the first byte of a row to the first of the next
        starts = ends - payload - 1
        bounds = np.stack([starts, ends], axis=1).reshape(-1)[:-1]
        out[ends - 1] = np.add.reduceat(out, bounds, dtype=np.int64)[::2] % 256
