"""HugeCTR's dump of embedding collections.

<path>/embedding_collection_<c>/meta_data   int32 x 5: tables, key type (0 uint32, 1 int64), value type (0 float32), 0,
                                            largest width | int32 x tables: id | uint64 x tables: keys | int32 x
                                            tables: width
                                key<i>      128 bytes, int32: 1, id, zeros; then keys
                                weight<i>   128 bytes, int32: 2, id, zeros; then float32, one row per key
Files are numbered by table id, the table's index in the collection; HugeCTR numbers files of a subset by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.processes import write
from viviane.compat.hugectr.tables import AnyTables, TableRows, collection_of, embeddings_of, read_rows, replace_rows
from viviane.core.errors import CheckpointError, ConfigError, suggest
from viviane.model import Model

_HEADER = 128


def dump(
    model: Model, columns: Columns, collections: Sequence[EmbeddingCollectionConfig], path: str, names: Sequence[str]
) -> None:
    """Write tables of all collections, or the named ones."""
    _check_names(collections, names)
    for number, one in enumerate(collections):
        chosen = [(i, name) for i, name in enumerate(one.tables) if not names or name in names]
        if not chosen:
            continue
        folder = Path(path) / f"embedding_collection_{number}"
        counts = []
        for place, name in chosen:
            rows = read_rows(*_table(model, columns, number, name))
            kind = "<u4" if columns.key_bytes == 4 else "<i8"
            write(folder / f"key{place}", _header(1, place) + rows.keys.astype(kind).tobytes())
            write(folder / f"weight{place}", _header(2, place) + rows.vectors.astype("<f4").tobytes())
            counts.append(len(rows.keys))
        widths = [one.tables[name].ev_size for _, name in chosen]
        head = [len(chosen), int(columns.key_bytes == 8), 0, 0, max(widths)]
        parts: list[Any] = [np.array(head, "<i4"), np.array([place for place, _ in chosen], "<i4")]
        parts += [np.array(counts, "<u8"), np.array(widths, "<i4")]
        write(folder / "meta_data", b"".join(part.tobytes() for part in parts))


def load(
    model: Model, columns: Columns, collections: Sequence[EmbeddingCollectionConfig], path: str, names: Sequence[str]
) -> None:
    """Replace tables of all collections, or the named ones, by the content of a dump.

    Raises:
        CheckpointError: a file is missing, or its sizes differ from the collection.
    """
    _check_names(collections, names)
    for number, one in enumerate(collections):
        chosen = [(i, name) for i, name in enumerate(one.tables) if not names or name in names]
        folder = Path(path) / f"embedding_collection_{number}"
        stored = _read_metadata(folder / "meta_data") if chosen else {}
        for place, name in chosen:
            if place not in stored:
                raise CheckpointError("the dump does not contain the table", where=str(folder), value=name,
                                      allowed=", ".join(map(str, stored)))  # fmt: skip
            kind, count, width, file = stored[place]
            if width != one.tables[name].ev_size:
                raise CheckpointError("the width of the table differs", where=f"{folder}, table {name!r}", value=width,
                                      allowed=str(one.tables[name].ev_size))  # fmt: skip
            keys = _read(folder / f"key{file}", kind, count).astype(np.int64)
            vectors = _read(folder / f"weight{file}", "<f4", count * width).astype(np.float32).reshape(-1, width)
            collection, slots = _table(model, columns, number, name)
            replace_rows(collection, slots, TableRows(keys, vectors), str(folder))


def _check_names(collections: Sequence[EmbeddingCollectionConfig], names: Sequence[str]) -> None:
    known = [name for one in collections for name in one.tables]
    if not collections:
        raise ConfigError("the model has no embedding collection", fix="use save_params_to_files")
    for name in names:
        if name not in known:
            raise ConfigError("unknown table", where="table_names", value=name, fix=suggest(name, known))


def _table(model: Model, columns: Columns, number: int, name: str) -> tuple[AnyTables, list[Slot]]:
    slot = next(one for one in columns.slots if one.table == name)
    for node in embeddings_of(model):
        collection = collection_of(model, node)
        if node.name.startswith(f"embedding_collection{number}_") and name in collection.tables:
            return collection, [slot]
    raise ConfigError("unknown table", value=name)


def _header(kind: int, table: int) -> bytes:
    numbers = np.zeros(_HEADER // 4, "<i4")
    numbers[:2] = kind, table
    return numbers.tobytes()


def _read_metadata(file: Path) -> dict[int, tuple[str, int, int, int]]:
    """Return, for each table id, key type, number of keys, width, and file number."""
    if not file.is_file():
        raise CheckpointError("the dump has no meta_data", where=str(file))
    data = file.read_bytes()
    if len(data) < 20:
        raise CheckpointError("meta_data is truncated", where=str(file), value=f"{len(data)} bytes")
    tables, key_type, value_type = (int(one) for one in np.frombuffer(data, "<i4", 3))
    if len(data) != 20 + 16 * tables or key_type not in (0, 1) or value_type != 0:
        raise CheckpointError(
            "meta_data does not describe float32 tables",
            where=str(file),
            value=f"{tables} tables, key type {key_type}, value type {value_type}, {len(data)} bytes",
        )
    ids = np.frombuffer(data, "<i4", tables, 20)
    counts = np.frombuffer(data, "<u8", tables, 20 + 4 * tables)
    widths = np.frombuffer(data, "<i4", tables, 20 + 12 * tables)
    result = {}
    for position, table in enumerate(ids.tolist()):
        by_id = _names_table(file.parent / f"key{table}", table)
        number = table if by_id else position
        result[table] = ("<i8" if key_type else "<u4", int(counts[position]), int(widths[position]), number)
    return result


def _names_table(file: Path, table: int) -> bool:
    """Return whether a file belongs to a table, by its header."""
    return file.is_file() and np.fromfile(file, "<i4", 2).tolist() == [1, table]


def _read(file: Path, kind: str, count: int) -> Any:
    if not file.is_file():
        raise CheckpointError("a file of the dump is missing", where=str(file))
    if file.stat().st_size != _HEADER + count * np.dtype(kind).itemsize:
        raise CheckpointError(
            "the size of the file differs from meta_data",
            where=str(file),
            value=file.stat().st_size,
            allowed=str(_HEADER + count * np.dtype(kind).itemsize),
        )
    return np.fromfile(file, kind, count, offset=_HEADER)
