"""Tables whose sizes a script gives, and that are made as their keys are met all the same.

HugeCTR makes every row of a slot with a size at once. Where these rows need more than half of the free memory, they
are made as their keys are met, so that a script of a terabyte's tables runs on a sample of its data. And the sizes of
a hash table over Norm data are a capacity: its keys may be any, where those of other readers are counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.enums import Check_t, DataReaderType_t, Embedding_t, Optimizer_t
from viviane.compat.hugectr.inputs import DataReaderParams, SparseEmbedding
from viviane.compat.hugectr.solver import OptParams
from viviane.compat.hugectr.sources import mounted
from viviane.core.machine import GIB, memory_bytes
from viviane.data import Dataset
from viviane.data.formats import NormFormat

_STATES: Final = {Optimizer_t.SGD: 0, Optimizer_t.Adam: 2, Optimizer_t.Ftrl: 2}
_ROWS: Final = 2048
_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def free_bytes(device: str) -> int | None:
    """Return the free memory of a GPU, or what is left of the machine's to this process; None if unknown."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    _, free = memory_bytes()
    limit = _LIMIT.read_text().strip() if _LIMIT.is_file() else ""
    used = _LIMIT.with_name("memory.current")
    if free is not None and limit.isdigit() and used.is_file():
        free = min(free, max(0, int(limit) - int(used.read_text())))
    return free


def fitting_slots(
    slots: Sequence[Slot],
    embeddings: Sequence[SparseEmbedding],
    collections: Sequence[EmbeddingCollectionConfig],
    optimizer: OptParams,
    free: int | None,
) -> tuple[Slot, ...]:
    """Return the slots, without sizes where the tables of all of them need more than half of the free memory."""
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
        "are free: rows are made as their keys are met, and a key beyond its slot's size goes unnoticed")  # fmt: skip
    return tuple(replace(slot, size=None) for slot in slots)


def slots_with_keys(
    columns: Columns, embeddings: Sequence[SparseEmbedding], reader: DataReaderParams
) -> tuple[Slot, ...]:
    """Return the slots, without sizes in groups of Norm data whose first rows have keys beyond them."""
    hashed = {
        one.bottom_name: one for one in embeddings
        if one.slot_size_array and one.embedding_type is not Embedding_t.LocalizedSlotSparseEmbeddingOneHot
    }  # fmt: skip
    first = next(iter(reader.sources), "")
    if reader.data_reader_type is not DataReaderType_t.Norm or not hashed or not first:
        return columns.slots
    path = mounted(first) if "://" in first else Path(first)
    if not path.exists():  # a script that reads its sources once may name them later
        return columns.slots
    form = NormFormat(
        check_sum=reader.check_type is Check_t.Sum, i64_input_key=columns.key_bytes == 8, shifted_keys=False
    )
    rows = Dataset(path, columns.reader_schema(), format=form).head(_ROWS)
    free = set()
    for slot in columns.slots:
        if slot.group not in hashed or slot.size is None or slot.group in free:
            continue
        index = rows.layout.one_hot_index
        keys = rows.one_hot[:, index[slot.column]] if slot.one_hot else rows.bags[slot.column].values
        if len(keys) and not slot.offset <= int(keys.min()) <= int(keys.max()) < slot.offset + slot.size:
            free.add(slot.group)
            say(f"Warning: SparseEmbedding {hashed[slot.group].sparse_embedding_name!r}: keys of {slot.column} are not "
                f"those that slot_size_array counts, {slot.offset} to {slot.offset + slot.size - 1}: the table takes "
                "any key, and its rows are made as keys are met")  # fmt: skip
    return tuple(replace(slot, size=None) if slot.group in free else slot for slot in columns.slots)


def _row_bytes(width: int, optimizer: OptParams) -> int:
    return 4 * width * (1 + _STATES.get(optimizer.optimizer_type, 1))
