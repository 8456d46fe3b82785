"""Tables that a script sizes for GPUs of a large machine, on a machine that cannot hold them.

HugeCTR makes every row of a slot with a size at once. Where these rows need more than half of the free memory, they
are made as their keys are met, so that a script of a terabyte's tables runs on a sample of its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig
from viviane.compat.hugectr.columns import Slot
from viviane.compat.hugectr.enums import Optimizer_t
from viviane.compat.hugectr.inputs import SparseEmbedding
from viviane.compat.hugectr.solver import OptParams
from viviane.core.machine import GIB, memory_bytes

_STATES: Final = {Optimizer_t.SGD: 0, Optimizer_t.Adam: 2, Optimizer_t.Ftrl: 2}
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


def _row_bytes(width: int, optimizer: OptParams) -> int:
    return 4 * width * (1 + _STATES.get(optimizer.optimizer_type, 1))
