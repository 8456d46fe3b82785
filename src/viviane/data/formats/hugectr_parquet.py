"""HugeCTR's Parquet: files with `_metadata.json` next to them, and a file list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow as pa
import pyarrow.compute as pc

from viviane.config.base import load_json
from viviane.core.errors import ConfigError, DataError, SchemaError, suggest
from viviane.core.file_names import file_inside
from viviane.core.files import write_json_atomic
from viviane.data.columns import arrow_types, is_list
from viviane.data.decode import decode_table, open_parquet, read_group
from viviane.data.formats.file_list import FILE_LIST, METADATA_FILE, is_file_list, read_file_list, write_file_list
from viviane.data.formats.format import FileEntry, FilePattern, Format, check_entries
from viviane.data.formats.parquet import groups_of, write_parquet
from viviane.data.formats.slots import check_slots, slots_of
from viviane.data.plan import RowGroup
from viviane.data.row_buffer import RowBuffer
from viviane.data.storage import DatasetFiles
from viviane.schema import CategoricalColumn, Schema


class HugectrParquetFormat(Format):
    """HugeCTR's Parquet: float32 labels and dense values, keys of 32 or 64 bits, scalars or lists.

    On reading, keys may have any integer type and labels any numeric type, if the conversion is lossless.

    Args:
        i64_input_key: write keys as int64 instead of int32.
        slot_sizes: HugeCTR's slot_size_array, for shifted keys; None: the columns' num_ids.
        shifted_keys: keys are unique over all slots: an id plus the sizes of the preceding slots. HugeCTR shifts keys
            when reading if it is given a slot_size_array; the files then contain ids of their own column.
        file_name: pattern of the names of files to write.
    """

    format: Literal["hugectr-parquet"] = "hugectr-parquet"
    i64_input_key: bool = False
    slot_sizes: tuple[int, ...] | None = None
    shifted_keys: bool = False
    file_name: FilePattern = "part-{:05}.parquet"

    def files_at(self, path: Path) -> list[Path]:
        """Return the files of a file list, of a folder's file list, or the files that the folder's metadata list."""
        if path.is_dir():
            if (path / FILE_LIST).exists():
                return read_file_list(path / FILE_LIST, inside=path)
            return [file_inside(path, name, where=str(path / METADATA_FILE)) for name in _metadata(path)["files"]]
        if not path.is_file() or not is_file_list(path):
            raise DataError("neither a file list nor a folder", where=str(path), fix=f"pass {FILE_LIST}")
        return read_file_list(path)

    def open(
        self, files: Sequence[Path], stored: Schema, schema: Schema, entries: Sequence[FileEntry] | None
    ) -> DatasetFiles:
        """Read the metadata and the footers, and compare them; see Format."""
        return HugectrParquetFiles(self, files, stored, schema, entries)

    def check_schema(self, schema: Schema) -> None:
        """Refuse weights, and keys that do not fit; see Format."""
        slots = slots_of(schema, self.slot_sizes, self.shifted_keys)
        check_slots(schema, slots, 8 if self.i64_input_key else 4, "hugectr-parquet")
        for slot in slots:
            if not self.i64_input_key and slot.shift + slot.column.id_range > 2**31:
                raise SchemaError("the keys do not fit int32", value=slot.column.name, fix="set i64_input_key")

    def types(self, schema: Schema) -> pa.Schema:
        """Return the columns of a file."""
        key = pa.int64() if self.i64_input_key else pa.int32()
        fields = []
        for name, kind in arrow_types(schema).items():
            column = schema.column(name)
            scalar = key if isinstance(column, CategoricalColumn) else pa.float32()
            fields.append(pa.field(name, pa.list_(scalar) if is_list(kind) else scalar, nullable=False))
        return pa.schema(fields)

    def write(
        self, folder: Path, target: Path, schema: Schema, tables: Iterator[pa.Table], rows_per_file: int
    ) -> tuple[FileEntry, ...]:
        """Write Parquet files, _metadata.json and file_list.txt; see Format."""
        types = self.types(schema)
        shifts = {slot.column.name: slot.shift for slot in slots_of(schema, self.slot_sizes, self.shifted_keys)}
        shifted = (_cast(table, types, shifts, "the rows to write").cast(types) for table in tables)
        files = write_parquet(folder, types, shifted, rows_per_file, self.file_name)
        columns: dict[str, Any] = {
            "file_stats": [{"file_name": file.name, "num_rows": file.rows} for file in files],
            "labels": [{"col_name": one.name, "index": types.get_field_index(one.name)} for one in schema.labels],
            "conts": [{"col_name": one.name, "index": types.get_field_index(one.name)} for one in schema.dense],
            "cats": [{"col_name": one.name, "index": types.get_field_index(one.name)} for one in schema.categorical],
        }
        write_json_atomic(folder / METADATA_FILE, columns)
        write_file_list(folder / FILE_LIST, [target / file.name for file in files])
        return files


class HugectrParquetFiles(DatasetFiles):
    """Parquet files of HugeCTR, whose columns are converted to the schema's types."""

    unit: ClassVar[str] = "row group"

    def __init__(
        self,
        options: HugectrParquetFormat,
        files: Sequence[Path],
        stored: Schema,
        schema: Schema,
        entries: Sequence[FileEntry] | None,
    ) -> None:
        super().__init__(schema, files)
        check_entries(files, self, entries)
        slots = slots_of(stored, options.slot_sizes, options.shifted_keys)
        self._shifts = {slot.column.name: -slot.shift for slot in slots}
        self._types = pa.schema([pa.field(name, kind) for name, kind in arrow_types(schema).items()])
        for number, path in enumerate(self.files):
            metadata = _metadata(path.parent)
            with open_parquet(path, lambda found, where, known=metadata: self._compare(found, where, known)) as file:  # type: ignore[misc]
                rows = file.metadata.num_rows
                if metadata["files"].get(path.name) != rows:
                    raise DataError(
                        f"{METADATA_FILE} and the file differ in the number of rows", where=str(path), value=rows,
                        allowed=str(metadata["files"].get(path.name)), fix=f"write {METADATA_FILE} again",
                    )  # fmt: skip
                self.groups += groups_of(number, file)

    def _compare(self, found: pa.Schema, where: str, metadata: dict[str, Any]) -> None:
        for name, index in metadata["columns"].items():
            if not 0 <= index < len(found.names) or found.names[index] != name:
                raise SchemaError(
                    f"{METADATA_FILE} and the file differ in the columns", where=where, value=f"{name!r} as {index}",
                    allowed=", ".join(f"{i} {one!r}" for i, one in enumerate(found.names[:8])),
                )  # fmt: skip
        for name in self.schema.column_names:
            if name not in metadata["columns"]:
                raise SchemaError(
                    f"a column of the schema is missing in {METADATA_FILE}", where=where, value=name,
                    fix=suggest(name, metadata["columns"]),
                )  # fmt: skip
            kind = found.field(name).type
            scalar = kind.value_type if is_list(kind) else kind
            whole = pa.types.is_integer(scalar)
            if not (whole or (pa.types.is_floating(scalar) and name not in self._shifts)):
                raise SchemaError(
                    "a column has a type that cannot be read", where=f"{where}, column {name!r}", value=str(kind),
                    allowed="integers for keys; integers or floats for labels and dense values",
                )  # fmt: skip

    def decode(self, group: RowGroup, buffer: RowBuffer, start: int, part: int) -> None:
        """Read a row group into a buffer; see DatasetFiles."""
        path = self.files[group.file]
        table = read_group(path, self.stamps[group.file], group, self.schema, named=True)
        table = _cast(table, self._types, self._shifts, f"{path}, row group {group.index}")
        decode_table(table, lambda name: self.place(group, name), self.schema, buffer, start, part)


def _cast(table: pa.Table, types: pa.Schema, shifts: dict[str, int], where: str) -> pa.Table:
    """Return the columns with other types and shifted keys; nulls stay nulls."""
    arrays = []
    for field in types:
        array: Any = table.column(field.name).combine_chunks()
        shift = shifts.get(field.name, 0)
        try:
            arrays.append(_converted(array, field.type, shift))
        except (pa.ArrowException, ValueError) as error:
            raise DataError(
                "a column cannot be converted without loss", where=f"{where}, column {field.name!r}",
                value=(str(error).splitlines() or [""])[0], allowed=str(field.type),
            ) from error  # fmt: skip
    return pa.table(arrays, names=types.names)


def _converted(array: Any, wanted: Any, shift: int) -> Any:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if is_list(array.type) and is_list(wanted):
        if pa.types.is_fixed_size_list(array.type):
            array = array.cast(pa.list_(array.type.value_type))
        values = array.values.slice(array.offsets[0].as_py(), array.offsets[-1].as_py() - array.offsets[0].as_py())
        offsets = pc.subtract(array.offsets, array.offsets[0]).cast(pa.int32())
        mask = array.is_null() if array.null_count else None
        inner = _converted(values, wanted.value_type, shift)
        return pa.ListArray.from_arrays(offsets, inner, mask=mask)
    if is_list(array.type) != is_list(wanted):
        if is_list(wanted) and pa.types.is_list(wanted):  # one key per row becomes a bag of one key
            inner = _converted(array, wanted.value_type, shift)
            return pa.ListArray.from_arrays(pa.array(range(len(array) + 1), pa.int32()), inner)
        raise ValueError(f"{array.type} is not {wanted}")
    if shift:
        array = pc.add_checked(array.cast(pa.int64()), shift)
    return array.cast(wanted, safe=not pa.types.is_floating(wanted))


def _metadata(folder: Path) -> dict[str, Any]:
    """Return rows by file and the index by column of _metadata.json.

    Raises:
        DataError: the file is missing or malformed.
    """
    path = folder / METADATA_FILE
    if not path.is_file():
        raise DataError(
            f"{METADATA_FILE} is missing", where=str(path), fix="HugeCTR's Parquet needs it next to the data"
        )
    try:
        content = load_json(path)
        files = {Path(one["file_name"]).name: int(one["num_rows"]) for one in content["file_stats"]}
        columns = {
            str(one["col_name"]): int(one["index"])
            for kind in ("labels", "conts", "cats")
            for one in content.get(kind, [])
        }
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{METADATA_FILE} is malformed", where=str(path), value=str(error)) from error
    return {"files": files, "columns": columns}
