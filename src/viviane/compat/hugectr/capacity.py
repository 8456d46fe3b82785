"""Tables with sizes in the script whose rows are nevertheless allocated on demand.

HugeCTR allocates every row of a slot with a size at once. If these rows need more than half of the free memory, they
are allocated when their keys first occur, so that a script with terabytes of tables runs on a sample of its data. For a
hash
table HugeCTR treats sizes as a capacity: its keys may be any. Tables that are indexed by their keys accept only keys
below their size, in HugeCTR and here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.enums import DataReaderType_t, Embedding_t, Optimizer_t
from viviane.compat.hugectr.inputs import DataReaderParams, SparseEmbedding
from viviane.compat.hugectr.listed_files import listed_files
from viviane.compat.hugectr.reading import format_of
from viviane.compat.hugectr.solver import OptParams
from viviane.compat.hugectr.sources import mounted
from viviane.core.machine import GIB, memory_bytes
from viviane.data import Dataset

_STATES: Final = {Optimizer_t.SGD: 0, Optimizer_t.Adam: 2, Optimizer_t.Ftrl: 2}
_ROWS: Final = 2048
_HASHED: Final = (Embedding_t.DistributedSlotSparseEmbeddingHash, Embedding_t.LocalizedSlotSparseEmbeddingHash)
_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def free_bytes(device: str) -> int:
    """Return the free memory of a GPU, or the memory of the machine that this process may still allocate."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    _, free = memory_bytes()
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else ""
    used = _LIMIT.with_name("memory.current")
    if limit.isdigit() and used.is_file():
        free = min(free, max(0, int(limit) - int(used.read_text())))
    return free


def fitting_slots(
    slots: Sequence[Slot],
    embeddings: Sequence[SparseEmbedding],
    collections: Sequence[EmbeddingCollectionConfig],
    optimizer: OptParams,
    free: int | None,
) -> tuple[Slot, ...]:
    """Return the slots, without sizes if their tables need more than half of the free memory."""
    by_group = {slot.group: sum(one.size or 0 for one in slots if one.group == slot.group) for slot in slots}
    need = sum(
        by_group.get(one.bottom_name, 0) * _row_bytes(one.embedding_vec_size, one.optimizer or optimizer)
        for one in embeddings
    )
    tables = [table for one in collections for table in one.tables.values()]
    need += sum((one.size or 0) * _row_bytes(one.ev_size, one.optimizer or optimizer) for one in tables)
    if free is None or need <= free // 2:
        return tuple(slots)
    say(f"Warning: the tables and their optimizer state need {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB of memory "
        "are free: rows are allocated on demand, and keys beyond their slot's size are not detected")  # fmt: skip
    return tuple(replace(slot, size=None) for slot in slots)


def slots_with_keys(
    columns: Columns, embeddings: Sequence[SparseEmbedding], reader: DataReaderParams
) -> tuple[Slot, ...]:
    """Return the slots, without sizes for groups of hash tables with keys beyond them.

    For Parquet the statistics of all files are read, for other formats the first rows.
    """
    hashed = {one.bottom_name: one for one in embeddings if one.embedding_type in _HASHED}
    first = next(iter(reader.sources), "")
    sized = [slot for slot in columns.slots if slot.group in hashed and slot.size is not None]
    if not sized or not first:
        return columns.slots
    path = mounted(first) if "://" in first else Path(first)
    if not path.exists():  # a script that reads its sources once may set them later
        return columns.slots
    found = _ranges_of_parquet(path, sized) if reader.data_reader_type is DataReaderType_t.Parquet else {}
    missing = [slot for slot in sized if slot.column not in found]
    if missing:
        found |= _ranges_of_first_rows(columns, reader, path, missing)
    free = set()
    for slot in sized:
        low, high = found.get(slot.column, (0, -1))
        begin = 0 if slot.from_zero else slot.offset
        if slot.group not in free and low <= high and not begin <= low <= high < begin + (slot.size or 0):
            free.add(slot.group)
            say(f"Warning: SparseEmbedding {hashed[slot.group].sparse_embedding_name!r}: keys of {slot.column} are not "
                f"in the range of slot_size_array, {begin} to {begin + (slot.size or 0) - 1}, but {low} to {high}: "
                "the table accepts any key, and allocates rows on demand")  # fmt: skip
    return tuple(replace(slot, size=None) if slot.group in free else slot for slot in columns.slots)


def _ranges_of_first_rows(
    columns: Columns, reader: DataReaderParams, path: Path, slots: Sequence[Slot]
) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest key of slots in the first rows."""
    rows = Dataset(path, columns.reader_schema(), format=format_of(reader, columns, path)).head(_ROWS)
    index = rows.layout.one_hot_index
    found = {}
    for slot in slots:
        keys = rows.one_hot[:, index[slot.column]] if slot.one_hot else rows.bags[slot.column].values
        if len(keys):
            found[slot.column] = (int(keys.min()), int(keys.max()))
    return found


def _ranges_of_parquet(path: Path, slots: Sequence[Slot]) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest key of slots, from the file statistics; others are skipped.

    Missing or damaged files are skipped; the reader reports them.
    """
    wanted = {slot.column for slot in slots}
    found: dict[str, tuple[int, int]] = {}
    unknown: set[str] = set()
    for file in listed_files(path, skip_missing=True):
        try:
            described = pq.read_metadata(file)
        except (OSError, pa.ArrowInvalid):
            return {}
        for group in range(described.num_row_groups):
            part = described.row_group(group)
            for number in range(part.num_columns):
                column = part.column(number)
                name = column.path_in_schema.partition(".")[0]
                if name not in wanted or not column.num_values:
                    continue
                known = column.statistics
                ends = (known.min, known.max) if known is not None and known.has_min_max else (None, None)
                smallest, largest = ends
                if not isinstance(smallest, int) or not isinstance(largest, int):  # the reader refuses other types
                    unknown.add(name)
                    continue
                low, high = found.get(name, (smallest, largest))
                found[name] = (min(low, smallest), max(high, largest))
    return {name: limits for name, limits in found.items() if name not in unknown}


def _row_bytes(width: int, optimizer: OptParams) -> int:
    return 4 * width * (1 + _STATES.get(optimizer.optimizer_type, 1))
