"""Tables in tiers in checkpoints: written and read chunk by chunk, never the complete table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from viviane.embedding import CachedStorage
from viviane.embedding.row_moves import PIECE_ROWS
from viviane.training.checkpoint.saved_table import STATE, SavedTable
from viviane.training.checkpoint.table_parts import TablePart


class TieredRows:
    """One column of a table, read from memory and tiers when it is written.

    Args:
        storage, table: the table and its storage.
        column: "weight", or the name of an optimizer state.
    """

    def __init__(self, storage: CachedStorage, table: str, column: str) -> None:
        self._storage, self._table, self._column = storage, table, column
        like = storage.column_shapes(table)[column]
        self.shape, self.dtype = tuple(like.shape), like.dtype

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes in order."""
        layout = self._storage.layouts[self._table]
        for first in range(0, self.shape[0], PIECE_ROWS):
            rows = self._storage.read_rows(self._table, first, min(first + PIECE_ROWS, self.shape[0]))
            yield np.ascontiguousarray(layout.column(rows, self._column))


def tiered_sources(storage: CachedStorage, table: str, names: list[str]) -> dict[str, TieredRows]:
    """Return the sources of a table's tensors, by their names in a checkpoint."""
    return {name: TieredRows(storage, table, name.removeprefix(STATE)) for name in names}


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
