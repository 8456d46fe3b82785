"""HugeCTR's Raw and RawAsync: one file without a header, a fixed number of keys per slot."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from viviane.core.errors import SchemaError
from viviane.data.formats.fixed_records import FixedRecordFormat, Record
from viviane.data.formats.slots import check_slots, slots_of
from viviane.schema import Schema


class RawFormat(FixedRecordFormat):
    """HugeCTR's Raw. A row is labels | dense values | one 4-byte key per slot; keys are ids of their own column.

    Args:
        float_label_dense: labels and dense values are float32; else int32, where a dense k means ln(k + 1).
        num_samples: number of rows that the file must have; without it, truncation at a row boundary is not detected.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> RawFormat().record(schema).dtype.itemsize
        8
    """

    format: Literal["raw"] = "raw"
    float_label_dense: bool = True
    num_samples: int | None = Field(default=None, ge=0)

    def record(self, schema: Schema) -> Record:
        """Return the record layout of these columns; see FixedRecordFormat."""
        for column in schema.bags:
            raise SchemaError(
                "raw needs one key per slot",
                value=f"{column.name!r}, {column.kind}",
                fix="use raw-async, norm or parquet",
            )
        check_slots(schema, slots_of(schema, None, False), 4, "raw")
        return Record(schema, not self.float_label_dense, not self.float_label_dense, 4)


class RawAsyncFormat(FixedRecordFormat):
    """HugeCTR's RawAsync. A row is labels, int32 | dense values | max_length keys of each slot.

    Args:
        is_dense_float: dense values are float32; else int32, where k means ln(k + 1).
        i64_input_key: keys of 8 bytes instead of 4.
        padding: id that fills bags shorter than max_length when writing, and is removed from the end of bags when
            reading; None: every bag has max_length ids.
        num_samples: number of rows that the file must have; without it, truncation at a row boundary is not detected.

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
        """Return the record layout of these columns; see FixedRecordFormat."""
        for column in schema.bags:
            if column.max_length is None:
                raise SchemaError(
                    "raw-async needs a fixed number of keys per slot", value=column.name, fix="set its max_length"
                )
        key_bytes = 8 if self.i64_input_key else 4
        check_slots(schema, slots_of(schema, None, False), key_bytes, "raw-async")
        return Record(schema, True, not self.is_dense_float, key_bytes, self.padding)
