"""Memory of the tables of an embedding training cache: what fits into workspace_size_per_gpu_in_mb, rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from viviane.compat.hugectr.arguments import note, say
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.inputs import SparseEmbedding
from viviane.compat.hugectr.processes import num_processes
from viviane.compat.hugectr.solver import OptParams
from viviane.core.errors import ConfigError, DataError
from viviane.data.formats.key_set import read_key_set
from viviane.embedding import TableConfig
from viviane.embedding.cache_sizes import slot_bytes, table_bytes

Keys = NDArray[np.int64]


def keys_of_slots(keys: Keys, slots: Sequence[Slot], where: str) -> dict[str, Keys]:
    """Return the rows, by column, that a keyset's keys have in the tables of sized slots; row 0 is padding.

    Raises:
        DataError: a key is in no slot.
    """
    found = {one.column: np.unique(keys[_inside(keys, one)] - one.offset + 1) for one in slots if one.size is not None}
    outside = np.ones(len(keys), bool)
    for one in slots:
        outside &= ~_inside(keys, one)
    if outside.any():
        raise DataError("a keyset has a key that is in no slot", where=where, value=int(keys[outside][0]),
                        allowed=", ".join(f"{one.offset} to {one.offset + (one.size or 0) - 1}" for one in slots[:8]),
                        fix="write the keyset with the offsets of slot_size_array")  # fmt: skip
    return found


def _inside(keys: Keys, slot: Slot) -> NDArray[np.bool_]:
    if slot.size is None:
        return np.ones(len(keys), bool)
    found: NDArray[np.bool_] = (keys >= slot.offset) & (keys < slot.offset + slot.size)
    return found


def pass_memory(
    columns: Columns, embeddings: Sequence[SparseEmbedding], optimizer: OptParams, keysets: Sequence[str], num_gpus: int
) -> dict[str, int]:
    """Return the bytes of memory of each table that is trained in passes, by "<embedding>.<table>".

    An embedding whose tables fit into its workspace stays whole in memory. Of the others each table gets the most keys
    that a keyset has of it, and a share of what the workspace leaves.

    Args:
        keysets: files that are known before the first pass.
        num_gpus: of vvgpu; the workspace is that of one.

    Raises:
        ConfigError: the keys of a keyset do not fit into the workspace; names the megabytes needed.
    """
    found: dict[str, int] = {}
    known = [
        (file, read_key_set(file, i64_input_key=columns.key_bytes == 8)) for file in keysets if Path(file).is_file()
    ]
    for one in embeddings:
        slots = [slot for slot in columns.slots if slot.group == one.bottom_name and not slot.table]
        where = f"SparseEmbedding {one.sparse_embedding_name!r}"
        limited = one.workspace_size_per_gpu_in_mb or one.max_vocabulary_size_per_gpu
        if not slots or slots[0].size is None or not limited:
            note(where, "passes: without slot_size_array and workspace_size_per_gpu_in_mb all rows stay in memory")
            continue
        rule = (one.optimizer or optimizer).to_sparse(static=True, where=where)
        tables = {
            slot.column: TableConfig(name=slot.table_name, num_rows=(slot.size or 0) + 1, dim=one.embedding_vec_size)
            for slot in slots
        }
        size = slot_bytes(next(iter(tables.values())), rule)
        on_gpu = int(one.workspace_size_per_gpu_in_mb * 2**20) or one.max_vocabulary_size_per_gpu * size
        memory = on_gpu * max(1, num_gpus // num_processes())
        whole = sum(table_bytes(table, rule) for table in tables.values())
        if whole <= memory:
            continue
        if getattr(rule, "update", "local") == "global":
            say(f"Warning: {where}: Update_t.Global moves every row in each step, so that all rows stay in memory; "
                "Update_t.LazyGlobal gives the same rows in passes")  # fmt: skip
            continue
        rows = _rows(tables, known, columns.slots)
        if sum(rows.values()) * size > memory + sum(rows.values()) * 18:  # a workspace does not count what notes slots
            raise ConfigError(
                "the keys of a pass do not fit into the workspace", where=where,
                value=f"{sum(rows.values()):,} rows, {-(-sum(rows.values()) * size // 2**20):,} MB",
                allowed=f"{memory:,} bytes",
                fix="raise workspace_size_per_gpu_in_mb, or write smaller keysets",
            )  # fmt: skip
        spare = max(0, memory // size - sum(rows.values()))
        every = sum(table.num_rows for table in tables.values())
        for column, table in tables.items():
            count = rows[column] + spare * table.num_rows // every
            found[f"{one.sparse_embedding_name}.{table.name}"] = max(1, min(count, table.num_rows)) * size
    return found


def _rows(
    tables: Mapping[str, TableConfig], known: Sequence[tuple[str, Keys]], slots: Sequence[Slot]
) -> dict[str, int]:
    most = dict.fromkeys(tables, 1)
    for file, keys in known:
        for column, own in keys_of_slots(keys, slots, file).items():
            if column in most:
                most[column] = max(most[column], len(own))
    return most
