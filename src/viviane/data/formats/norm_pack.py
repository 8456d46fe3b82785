"""Conversion of rows to the bytes of a Norm file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from viviane.data.formats.slots import Slot
from viviane.data.row_buffer import Jagged, RowView
from viviane.ops.norm_records import NormLayout, pack_records


def pack(
    view: RowView, rows: int, slots: Sequence[Slot], layout: NormLayout, *, whole_labels: bool = False
) -> NDArray[np.uint8]:
    """Return rows as records.

    Args:
        whole_labels: write labels as int32.

    Example:
        >>> from viviane.data.formats.slots import Slot
        >>> from viviane.schema import CategoricalColumn
        >>> slots = [Slot(CategoricalColumn(name="c", num_ids=9), shift=100)]
        >>> ids, nothing = np.array([[3]], np.int32), np.zeros((1, 0), np.float32)
        >>> view = RowView(((0, np.ones((1, 1), np.float32)),), ((0, nothing),), ((0, ids),), None, {})
        >>> layout = NormLayout(num_numbers=1, num_slots=1, key_bytes=4, check_sum=False)
        >>> pack(view, 1, slots, layout).tobytes().hex(" ", 4)
        '0000803f 01000000 67000000'
    """
    bags = [_bag(view, slots, i, rows) for i in range(len(slots))]
    lengths = [np.diff(bag.offsets) for bag in bags]
    keys = [bag.values.astype(np.int64) + slot.shift for bag, slot in zip(bags, slots, strict=True)]
    labels = view.labels[0][1]
    if whole_labels:
        labels = labels.astype(np.int32).view(np.float32)
    return pack_records(
        np.concatenate([labels, view.dense[0][1]], axis=1),
        np.array(lengths, np.int32).reshape(len(slots), rows),
        np.concatenate([np.zeros(0, np.int64), *keys]),
        layout,
    )


def _bag(view: RowView, slots: Sequence[Slot], index: int, rows: int) -> Jagged:
    column = slots[index].column
    if column.kind != "one_hot":
        bag = view.bags[column.name]
        return Jagged(bag.values, bag.offsets.astype(np.int64))
    position = sum(slot.column.kind == "one_hot" for slot in slots[:index])
    return Jagged(view.one_hot[0][1][:, position], np.arange(rows + 1, dtype=np.int64))
