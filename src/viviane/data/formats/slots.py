"""HugeCTR's slots: each categorical column of a schema is one slot, in the schema's order.

If keys are unique over all slots, a key is the id plus the sizes of the preceding slots (slot_size_array).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from viviane.core.errors import ConfigError, SchemaError
from viviane.schema import CategoricalColumn, Schema


@dataclass(frozen=True)
class Slot:
    """One slot: key = id + shift."""

    column: CategoricalColumn
    shift: int


def slots_of(schema: Schema, slot_sizes: Sequence[int] | None, shifted: bool) -> list[Slot]:
    """Return the slots of a schema.

    Args:
        schema: its categorical columns are the slots.
        slot_sizes: HugeCTR's slot_size_array; None: the columns' num_ids.
        shifted: keys include the sizes of the preceding slots.

    Raises:
        ConfigError: the number of sizes differs from the number of columns, or a size is below the column's num_ids.

    Example:
        >>> schema = Schema(categorical=[{"name": "a", "num_ids": 5}, {"name": "b", "num_ids": 7}])
        >>> [slot.shift for slot in slots_of(schema, None, True)]
        [0, 5]
    """
    columns = schema.categorical
    sizes = [column.id_range for column in columns] if slot_sizes is None else list(slot_sizes)
    if len(sizes) != len(columns):
        raise ConfigError("there must be one size per slot", value=f"{len(sizes)} sizes", allowed=str(len(columns)))
    for column, size in zip(columns, sizes, strict=True):
        if size < column.id_range:
            raise ConfigError(
                "a slot is smaller than its column", where=f"column {column.name!r}", value=size,
                allowed=f"at least {column.num_ids} (num_ids)",
            )  # fmt: skip
    starts = np.cumsum([0, *sizes]).tolist()
    return [Slot(column, start if shifted else 0) for column, start in zip(columns, starts, strict=False)]


def check_slots(schema: Schema, slots: Sequence[Slot], key_bytes: int, keeps: str) -> None:
    """Refuse what formats with slots cannot store: weights, and keys that are too large.

    Raises:
        SchemaError: a column cannot be stored; names it.
    """
    for name in (schema.sample_weight, *(column.weights for column in schema.categorical)):
        if name is not None:
            raise SchemaError(
                f"{keeps} cannot store weights", value=name,
                fix="omit the column with --columns or schema.select, or use parquet or viviane",
            )  # fmt: skip
    limit = 1 << (32 if key_bytes == 4 else 63)
    for slot in slots:
        if slot.shift + slot.column.id_range > limit:
            raise SchemaError(
                f"the keys do not fit {key_bytes} bytes", where=f"column {slot.column.name!r}",
                value=slot.shift + slot.column.id_range, allowed=f"at most {limit}", fix="use keys of 8 bytes",
            )  # fmt: skip
