"""Read a table of a checkpoint into tiers: chunk by chunk, never the complete table."""

from __future__ import annotations

import torch

from viviane.embedding import CachedStorage
from viviane.embedding.cached_storage import PIECE_ROWS
from viviane.training.checkpoint.saved_table import STATE, SavedTable
from viviane.training.checkpoint.table_parts import TablePart


def restore_rows(storage: CachedStorage, saved: SavedTable, part: TablePart, *, weights_only: bool) -> None:
    """Write the rows of a part, and their state unless `weights_only`, into tiers and cache.

    Args:
        storage: storage of the part.
        saved: the table in the checkpoint.
        part: the part to restore.
    """
    names = [name for name in storage.column_shapes(part.table) if name == "weight" or not weights_only]
    for first in range(0, len(part.keys), PIECE_ROWS):
        keys = part.keys[first : first + PIECE_ROWS]
        given: dict[str, torch.Tensor] = {}
        for name in names:
            given[name] = saved.read("weight" if name == "weight" else f"{STATE}{name}", keys, part.start, part.stop)
        storage.write_columns(part.table, first, given)
