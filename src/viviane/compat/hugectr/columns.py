"""Conversion of HugeCTR's reader and Input to schemas: one for reading rows, one for the model.

Two schemas have the same columns. The reader's accepts any number as a label and any key; the model's specifies which
slots have tables of known size. In between keys are shifted, so that key 0 is an ordinary key as in HugeCTR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

from viviane.batch import Bag, Batch, Layout
from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.enums import DataReaderType_t
from viviane.compat.hugectr.inputs import DataReaderParams, Input, SparseEmbedding
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.listed_files import listed_files
from viviane.compat.hugectr.sources import source_path
from viviane.core.errors import ConfigError, DataError, SchemaError
from viviane.core.json_files import expected_form
from viviane.data.decode import open_parquet
from viviane.data.formats.file_list import METADATA_FILE
from viviane.schema import Schema

_LARGEST: Final = 2**63 - 1  # HugeCTR's hash tables reserve this key


@dataclass(frozen=True)
class Slot:
    """One slot: its column, maximum keys per row, and table.

    Args:
        column: name of its column in the schemas.
        group: its DataReaderSparseParam.
        nnz: maximum keys per row, which HugeCTR up to 3.9 took as an average over the group's slots.
        one_hot: every row has exactly one key.
        offset: difference between its keys in HugeCTR and those of the file or its table.
        size: rows of its own table; None: all slots of the group share a dynamic table.
        from_zero: keys of this slot in the file start at 0.
        table: name of its table in the script; "": the slot or the group has its own table.
        source: column of the file, if the model has several columns from it; "": the column of the same name.
        most: keys that a row of the file may have; 0: nnz.
    """

    column: str
    group: str
    nnz: int
    one_hot: bool
    offset: int = 0
    size: int | None = None
    from_zero: bool = False
    table: str = ""
    source: str = ""
    most: int = 0

    @property
    def read_as(self) -> str:
        """Its column of the file."""
        return self.source or self.column

    @property
    def table_name(self) -> str:
        """The table of its lookup."""
        return self.table or (self.group if self.size is None else self.column)

    @property
    def shift(self) -> int:
        """Value added to a key of the file before the lookup; row 0 of a table with known size is not used."""
        if self.size is None:
            return self.offset if self.from_zero else 0
        return 1 if self.from_zero else 1 - self.offset


@dataclass(frozen=True)
class Columns:
    """All columns of the data.

    Args:
        labels: columns of each label tensor.
        dense: columns of the dense tensor, with their widths.
        slots: slots in the data's order, then additional columns of the model.
        key_bytes: 4 (unsigned) or 8.
    """

    labels: dict[str, tuple[str, ...]]
    dense: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]
    key_bytes: int
    _shifts: dict[str, Any] = field(default_factory=dict, compare=False)

    def reader_schema(self) -> Schema:
        """Return the schema for reading rows."""
        limit = 2**32 if self.key_bytes == 4 else _LARGEST
        slots = [slot for slot in self.slots if not slot.source]
        return self._schema("regression", slots, [limit] * len(slots))

    def model_schema(self) -> Schema:
        """Return the schema of the model; keys without a known range are raw."""
        ranges = [None if slot.size is None else slot.size + 1 for slot in self.slots]
        return self._schema("binary", self.slots, ranges)

    def _schema(self, task: str, slots: Sequence[Slot], ranges: Sequence[int | None]) -> Schema:
        categorical = []
        for slot, num_ids in zip(slots, ranges, strict=True):
            many = {"kind": "multi_hot", "max_length": slot.most or slot.nnz}
            kind = {"kind": "one_hot"} if slot.one_hot else many
            own = slot.table_name == slot.column or (task == "regression" and slot.size is not None)
            shared = {} if own else {"vocabulary": slot.table_name}
            categorical.append({"name": slot.column, "num_ids": num_ids, "dtype": "int64", **kind, **shared})
        return Schema.from_dict(
            {
                "labels": [{"name": one, "task": task} for names in self.labels.values() for one in names],
                "dense": [{"name": name, "dim": dim} for name, dim in self.dense],
                "categorical": categorical,
            }
        )

    def shifted(self, batch: Batch) -> Batch:
        """Convert a batch of the reader to the columns and keys of the model."""
        if not any(slot.shift or slot.source for slot in self.slots):
            return batch
        if not self._shifts:
            own = [slot for slot in self.slots if slot.one_hot]
            self._shifts["layout"] = Layout.of(self.model_schema())
            self._shifts["one_hot"] = torch.tensor([slot.shift for slot in own], dtype=torch.int64)
            places = [batch.layout.one_hot_index[slot.read_as] for slot in own]
            self._shifts["places"] = None if places == list(range(len(places))) else torch.tensor(places)
        places, layout = self._shifts["places"], self._shifts["layout"]
        one_hot = batch.one_hot if places is None else batch.one_hot[:, places]
        bags = {slot.column: _moved(batch.bags[slot.read_as], slot.shift) for slot in self.slots if not slot.one_hot}
        return replace(batch, layout=layout, one_hot=one_hot + self._shifts["one_hot"], bags=bags)


def _moved(bag: Bag, shift: int) -> Bag:
    return replace(bag, values=bag.values + shift) if shift else bag


def columns_of(
    reader: DataReaderParams,
    given: Input,
    embeddings: Sequence[SparseEmbedding],
    *,
    i64_input_key: bool,
) -> Columns:
    """Return the columns of HugeCTR's data.

    Raises:
        ConfigError: dimensions are inconsistent or differ from the files.
    """
    if reader.data_reader_type is DataReaderType_t.Parquet:
        labels, dense, slots = _parquet(reader, given)
    else:
        labels = [f"{name}_{i}" if dim > 1 else name for name, dim in given.labels.items() for i in range(dim)]
        dense = ((given.dense_name, given.dense_dim),) if given.dense_dim else ()
        slots = [
            Slot(
                f"{group.top_name}_{i}",
                group.top_name,
                nnz,
                nnz == 1 and _is_fixed(reader, group),
                most=0 if _is_fixed(reader, group) else group.most,
            )
            for group in given.sparse
            for i, nnz in enumerate(_keys_of(reader, nnz) for nnz in group.nnz)
        ]
    widths = iter(labels)
    by_label = {name: tuple(next(widths) for _ in range(dim)) for name, dim in given.labels.items()}
    wide = i64_input_key and reader.data_reader_type is not DataReaderType_t.Raw  # its keys always have 4 bytes
    return Columns(by_label, dense, tuple(_with_tables(reader, slots, embeddings)), 8 if wide else 4)


def _is_fixed(reader: DataReaderParams, group: Any) -> bool:
    return reader.data_reader_type is not DataReaderType_t.Norm or bool(group.is_fixed_length)


def _keys_of(reader: DataReaderParams, nnz: int) -> int:
    """Return the number of keys per row of a slot in the file: Raw has one, regardless of nnz_per_slot."""
    return 1 if reader.data_reader_type is DataReaderType_t.Raw else nnz


def _with_tables(reader: DataReaderParams, slots: Sequence[Slot], embeddings: Sequence[SparseEmbedding]) -> list[Slot]:
    """Return the slots with the sizes from the reader or the embeddings.

    HugeCTR adds the sizes of the preceding slots to the keys of a slot. A slot of size 0 starts at the same key as the
    next one, so both have the same keys: then its group looks up one dynamic table.
    """
    sizes: list[int | None] = [None] * len(slots)
    offsets = [0] * len(slots)
    from_zero = [False] * len(slots)
    given = _sizes_of_slots(reader, slots)
    if given:
        sizes, from_zero = list(given), [True] * len(slots)
        offsets = list(accumulate(given, initial=0))[:-1]
    raw = reader.data_reader_type in (DataReaderType_t.Raw, DataReaderType_t.RawAsync)
    for embedding in embeddings:
        places = [i for i, slot in enumerate(slots) if slot.group == embedding.bottom_name]
        where = f"SparseEmbedding {embedding.sparse_embedding_name!r}, slot_size_array"
        if not embedding.slot_size_array:  # sizes apply to the slots, for every embedding that uses them
            continue
        own = list(embedding.slot_size_array)
        _check_count(own, len(places), where)
        for place, size, offset in zip(places, own, accumulate(own, initial=0), strict=False):
            known = sizes[place]
            if known is None:
                sizes[place], offsets[place], from_zero[place] = size, offset, raw
            elif known != size:
                say(f"Warning: {where}: slot {slots[place].column} has {size} keys here and {known} elsewhere: "
                    "the larger number is used")  # fmt: skip
                sizes[place] = max(known, size)
    shared = {slot.group for slot, size in zip(slots, sizes, strict=True) if size == 0}
    found = zip(slots, offsets, sizes, from_zero, strict=True)
    return [
        replace(slot, offset=offset, size=None if slot.group in shared else size, from_zero=zero)
        for slot, offset, size, zero in found
    ]


def _sizes_of_slots(reader: DataReaderParams, slots: Sequence[Slot]) -> list[int]:
    """Return the reader's slot_size_array, one size per slot, or none; keys of Norm already include their offsets."""
    given = list(reader.slot_size_array)
    if not given or reader.data_reader_type is DataReaderType_t.Norm:
        return []
    _check_count(given, len(slots), "DataReaderParams, slot_size_array")
    return given


def _check_count(sizes: Sequence[int], count: int, where: str) -> None:
    if len(sizes) != count or min(sizes, default=1) < 0:
        raise ConfigError("one size per slot is needed", where=where, value=sizes, allowed=f"{count} numbers from 0")


def _parquet(reader: DataReaderParams, given: Input) -> tuple[list[str], tuple[tuple[str, int], ...], list[Slot]]:
    """Return label columns, dense columns and slots from _metadata.json and the first file."""
    path = source_path(reader.sources[0], reader.data_reader_type, training=True)
    file = listed_files(path, skip_missing=True)[0]
    path = file.parent / METADATA_FILE
    if not path.is_file():
        raise DataError(f"{METADATA_FILE} is missing", where=str(path), fix="HugeCTR's Parquet needs it")
    content = load_json(path)
    with expected_form(str(path), DataError):
        named = {
            kind: [str(one["col_name"]) for one in sorted(content.get(kind, []), key=lambda one: int(one["index"]))]
            for kind in ("labels", "conts", "cats")
        }
    types = _types_of(file, [name for names in named.values() for name in names], path)
    dense = tuple((name, _width(file, name, types[name])) for name in named["conts"])
    slots = [
        Slot(column, group.top_name, nnz, not _is_list(types[column]), most=group.most)
        for (group, nnz), column in zip(
            ((group, nnz) for group in given.sparse for nnz in group.nnz), named["cats"], strict=False
        )
    ]
    counts = (
        ("label_dim", sum(given.labels.values()), sum(_width(file, one, types[one]) for one in named["labels"])),
        ("dense_dim", given.dense_dim, sum(width for _, width in dense)),
        ("slot_num", sum(group.slot_num for group in given.sparse), len(named["cats"])),
    )  # fmt: skip
    for name, wanted, there in counts:
        if wanted != there:
            raise ConfigError(f"Input's {name} differs from the files", where=str(path), value=wanted,
                              allowed=str(there), fix=f"correct Input, or {METADATA_FILE}")  # fmt: skip
    return named["labels"], dense, slots


def _types_of(file: Path, names: Sequence[str], metadata: Path) -> dict[str, pa.DataType]:
    """Return the types of columns of a Parquet file.

    Raises:
        DataError: the file is damaged.
        SchemaError: it lacks a column, or has two of one name.
    """
    with open_parquet(file, lambda *_: None) as opened:
        types = opened.schema_arrow
    for name in names:
        if (count := len(types.get_all_field_indices(name))) != 1:
            raise SchemaError(
                f"a column of {METADATA_FILE} is missing in the file" if not count else "two columns have one name",
                where=f"{metadata} and {file.name}", value=name[:200], allowed=", ".join(types.names[:20]),
                fix=f"correct {METADATA_FILE}, or write the file again",
            )  # fmt: skip
    return {name: types.field(name).type for name in names}


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _width(file: Path, name: str, kind: pa.DataType) -> int:
    if not _is_list(kind):
        return 1
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size)
    with open_parquet(file, lambda *_: None) as opened:
        try:
            first = next(opened.iter_batches(1, columns=[name]), None)
        except (OSError, pa.ArrowException) as error:
            raise DataError("a column cannot be read: the file is damaged", where=f"{file}, column {name!r}",
                            value=str(error)[:200], fix="copy or write the file again") from error  # fmt: skip
    if first is None or not len(first):
        raise DataError("the width of a list column is unknown because the file has no rows", where=str(file))
    if not first.column(0)[0].is_valid:
        raise DataError("the width of a list column is unknown because its first row is null",
                        where=f"{file}, column {name!r}")  # fmt: skip
    return len(first.column(0)[0])
