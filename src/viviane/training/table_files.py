"""Embedding tables in a checkpoint: one file of named tensors each.

A table of a `TableConfig` writes weight (num_rows, dim) and state.<name>; a dynamic one its keys, rows, weight
(K, dim), times and numbers of use, state.<name>, and what waits for admission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, TableState
from viviane.embedding.dynamic_content import misfits, state_entries
from viviane.training.dense_state import collections_of
from viviane.training.manifest import TableEntry, TensorEntry
from viviane.training.tensor_files import read_tensors, write_tensors

_STATE = "state."
_FOR_TRAINING = (_STATE, "admission.")


@dataclass(frozen=True)
class TableFile:
    """A table of a module, as checkpoints know it.

    Args:
        full: "<collection>.<table>".
        collection, name: where it is.
    """

    full: str
    collection: EmbeddingCollection
    name: str

    @property
    def is_dynamic(self) -> bool:
        """Whether its rows come with their keys."""
        return isinstance(self.collection.tables[self.name], DynamicTableConfig)

    @property
    def signature(self) -> str:
        """What must agree between a checkpoint and a module."""
        table = self.collection.tables[self.name]
        rows = "keys" if isinstance(table, DynamicTableConfig) else table.num_rows
        return f"{table.dtype}[{rows}, {table.dim}]"

    @property
    def _step(self) -> int:
        if self.is_dynamic:
            return self.collection.dynamic_table(self.name).num_steps
        return self.collection.export_table(self.name, copy=False).step

    def tensors(self, optimizer_state: bool) -> dict[str, Tensor]:
        """Return what its file holds; views of the live memory, where it is not dynamic."""
        if self.is_dynamic:
            entries = state_entries(self.collection.dynamic_table(self.name), "")
            left_out = () if optimizer_state else _FOR_TRAINING
            return {name: part for name, part in entries.items() if not name.startswith(left_out)}
        content = self.collection.export_table(self.name, copy=False)
        state = content.state if optimizer_state else {}
        return {"weight": content.weight, **{_STATE + name: part for name, part in state.items()}}

    def write(self, folder: Path, optimizer_state: bool) -> TableEntry:
        """Write the table's file, and describe it."""
        tensors = self.tensors(optimizer_state)
        file = f"tables/{quote(self.full, safe='.-_')}.safetensors"
        write_tensors(folder / file, tensors)
        state = tuple(name.removeprefix(_STATE) for name in tensors if name.startswith(_STATE))
        return TableEntry(
            file=file,
            weight=TensorEntry.of(tensors["weight"]),
            state=state,
            step=self._step if optimizer_state else 0,
            is_dynamic=self.is_dynamic,
        )

    def read(self, folder: Path, entry: TableEntry, weights_only: bool) -> dict[str, Tensor]:
        """Map the table's file into memory, and compare it with the table; nothing is changed.

        Raises:
            CheckpointError: the table was trained by another optimizer, or its keys do not fit.
        """
        where = f"{folder / entry.file}, table {self.name!r}"
        mine = [name.removeprefix(_STATE) for name in self.tensors(True) if name.startswith(_STATE)]
        if not weights_only and set(mine) != set(entry.state):
            raise CheckpointError(
                "the table was trained by another optimizer",
                where=where,
                value=f"state: {', '.join(entry.state) or 'none'}",
                allowed=", ".join(mine) or "none",
                fix="resume with the embedding optimizer of that run, or load with weights_only=True",
            )
        tensors = read_tensors(folder / entry.file)
        if weights_only:
            tensors = {n: part for n, part in tensors.items() if not n.startswith(_FOR_TRAINING)}
        if self.is_dynamic:
            wrong = misfits(self.collection.dynamic_table(self.name), tensors, weights_only=weights_only)
            if wrong:
                raise CheckpointError("the table's keys do not fit", where=where, value="; ".join(wrong))
        return tensors

    def restore(self, entry: TableEntry, tensors: Mapping[str, Tensor], weights_only: bool) -> None:
        """Copy what `read` gave into the table."""
        if self.is_dynamic:
            table = self.collection.dynamic_table(self.name)
            table.replace(tensors)
            if weights_only:
                table.num_steps = 0
            return
        state = {name: tensors[_STATE + name] for name in entry.state} if not weights_only else {}
        content = TableState(tensors["weight"], state, 0 if weights_only else entry.step)
        self.collection.import_table(self.name, content)


def table_files(module: nn.Module) -> list[TableFile]:
    """Return every table of a module."""
    return [
        TableFile(f"{prefix}.{name}" if prefix else name, collection, name)
        for prefix, collection in collections_of(module).items()
        for name in collection.tables
    ]
