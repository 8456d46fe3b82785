"""HugeCTR's RawAsync: one file without a header, a fixed number of keys a slot."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.core.errors import SchemaError
from viviane.data.formats.fixed_records import FixedRecordFormat, Record
from viviane.data.formats.slots import check_slots, slots_of
from viviane.schema import Schema


class RawAsyncFormat(FixedRecordFormat):
    """HugeCTR's RawAsync. A row is labels, int32 | dense numbers | the keys of each slot, as many as max_length.

    Args:
        is_dense_float: dense numbers are float32; else int32, where k stands for ln(k + 1).
        i64_input_key: keys of 8 bytes instead of 4.
        padding: id that fills bags shorter than max_length when they are written, and that is cut from their ends
            when they are read; None: every bag has max_length ids.
        num_samples: rows that the file must have; without it, a file cut between two rows goes unnoticed.

    Example:
        >>> tags = {"name": "t", "num_ids": 9, "kind": "multi_hot", "max_length": 3}
        >>> RawAsyncFormat().record(Schema(labels=[{"name": "y"}], categorical=[tags])).dtype.itemsize
        16
    """

    format: Literal["raw-async"] = "raw-async"
    is_dense_float: bool = True
    i64_input_key: bool = False
    padding: int | None = Field(default=None, ge=0)
    num_samples: int | None = Field(default=None, ge=0)

    def record(self, schema: Schema) -> Record:
        """Return what one record of these columns holds; see FixedRecordFormat."""
        for column in schema.bags:
            if column.max_length is None:
                raise SchemaError(
                    "raw-async holds a fixed number of keys a slot", value=column.name, fix="set its max_length"
                )
        key_bytes = 8 if self.i64_input_key else 4
        check_slots(schema, slots_of(schema, None, False), key_bytes, "raw-async")
        return Record(schema, True, not self.is_dense_float, key_bytes, self.padding)
