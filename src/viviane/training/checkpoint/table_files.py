"""Embedding tables in a checkpoint: files of named tensors, one per table or one per shard.

A table of a `TableConfig` writes weight (num_rows, dim) and state.<name>; a dynamic table writes its keys, rows, weight
(K, dim), times and counts of use, state.<name>, and the keys that wait for admission.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.embedding import DynamicTableConfig, TableCollection
from viviane.embedding.dynamic_content import misfits
from viviane.embedding.module_parts import collections_of
from viviane.ops.row_update import initial_state
from viviane.training.checkpoint.increments import open_table
from viviane.training.checkpoint.manifest import Manifest, ShardEntry, TableEntry, TensorEntry
from viviane.training.checkpoint.saved_table import MEAN, STATE, SavedTable
from viviane.training.checkpoint.table_parts import TablePart, parts_of

_FOR_TRAINING = (STATE, "admission.")


def table_file(full: str, index: int = 0, count: int = 1) -> str:
    """Return the name of a table's file.

    Example:
        >>> table_file("tables.user"), table_file("tables.user", 1, 4)
        ('tables/tables.user.safetensors', 'tables/tables.user.2-of-4.safetensors')
    """
    shard = "" if count == 1 else f".{index + 1}-of-{count}"
    return f"tables/{quote(full, safe='.-_')}{shard}.safetensors"


@dataclass(frozen=True)
class TableFile:
    """A table of a module, for writing and reading checkpoints.

    Args:
        full: "<collection>.<table>".
        collection, name: the collection and its table.
    """

    full: str
    collection: TableCollection
    name: str

    @property
    def is_dynamic(self) -> bool:
        """Whether it is keyed by arbitrary ids."""
        return isinstance(self.collection.tables[self.name], DynamicTableConfig)

    @property
    def signature(self) -> str:
        """Type and shape, which must agree between a checkpoint and a module."""
        table = self.collection.tables[self.name]
        rows = "keys" if isinstance(table, DynamicTableConfig) else table.num_rows
        return f"{table.dtype}[{rows}, {table.dim}]"

    @cached_property
    def parts(self) -> list[TablePart]:
        """The part of the table on each process."""
        return parts_of(self.collection, self.name)

    @property
    def _state(self) -> tuple[str, ...]:
        """Names of its optimizer state."""
        table = self.collection.tables[self.name]
        rule = (table.optimizer or self.collection.optimizer) if table.trainable else None
        return tuple(initial_state(rule))

    def tensors(self, part: TablePart, optimizer_state: bool, rows: Tensor | None = None) -> dict[str, Tensor]:
        """Return the tensors of a part of this process.

        Args:
            part: a part on this process.
            optimizer_state: False: weights only.
            rows: of an increment, which have changed; None: all rows.

        Returns:
            by name: copies of a dynamic table and of changed rows, else views of the live memory; of tables in tiers
            the shapes of all rows.
        """
        left_out = () if optimizer_state else _FOR_TRAINING
        entries = part.tensors(rows)
        if optimizer_state and part.mean is not None:
            entries[MEAN] = part.mean
        return {name: one for name, one in entries.items() if not name.startswith(left_out)}

    # Writing ------------------------------------------------------------------------------------------------

    def describe(self, part: TablePart, optimizer_state: bool, *, is_increment: bool = False) -> TableEntry:
        """Describe the table, on a process that holds a part of it.

        Args:
            part: a part on this process.
            optimizer_state: False: the file has weights only.
            is_increment: the file has only rows that changed.
        """
        table, storage, count = self.collection.tables[self.name], part.storage, len(self.parts)
        assert storage is not None
        last = max((one.keys[-1] for one in self.parts if one.keys), default=-1)
        rows = storage.num_rows(self.name) if self.is_dynamic else last + 1
        shards = [
            ShardEntry(
                file=table_file(self.full, i, count),
                keys=(one.keys.start, one.keys.stop, one.keys.step),
                columns=(one.start, one.stop),
            )
            for i, one in enumerate(self.parts)
        ]
        return TableEntry(
            file=table_file(self.full) if count == 1 else None,
            shards=tuple(shards) if count > 1 else (),
            weight=TensorEntry(shape=(rows, table.dim), dtype=table.dtype),
            state=self._state if optimizer_state else (),
            has_mean=optimizer_state and storage.row_mean is not None,
            step=storage.num_steps(self.name) if optimizer_state else 0,
            is_dynamic=self.is_dynamic,
            is_increment=is_increment,
        )

    # Reading ------------------------------------------------------------------------------------------------

    def read(self, folder: Path, manifest: Manifest, weights_only: bool) -> SavedTable:
        """Memory-map the table's files and compare them with the table; the table is not changed.

        Raises:
            CheckpointError: the table was trained with another optimizer, or its keys do not match.
        """
        entry = manifest.tables[self.full]
        where = f"{folder / entry.files[0]}, table {self.name!r}"
        if not weights_only and set(self._state) != set(entry.state):
            raise CheckpointError(
                "the table was trained with another optimizer",
                where=where,
                value=f"state: {', '.join(entry.state) or 'none'}",
                allowed=", ".join(self._state) or "none",
                fix="resume with the embedding optimizer of that run, or load with weights_only=True",
            )
        saved = open_table(folder, manifest, self.full)
        for part in self.parts:
            if part.storage is None:
                continue
            if self.is_dynamic:
                tensors = SavedPart(saved, part, weights_only=weights_only).content()
                wrong = misfits(part.storage.dynamic_table(self.name), tensors, weights_only=weights_only)
                if wrong:
                    raise CheckpointError("the table's keys do not match", where=where, value="; ".join(wrong))
            else:
                self._check_widths(saved, part, where, weights_only)
        return saved

    def _check_widths(self, saved: SavedTable, part: TablePart, where: str, weights_only: bool) -> None:
        for name, own in part.tensors().items():
            if weights_only and name != "weight":
                continue
            wide, _ = saved.meta(name)
            if wide != (own.dim() == 2):
                kinds = {True: "one element per column", False: "one element per row"}
                raise CheckpointError(
                    "the shape differs", where=f"{where}, {name}", value=kinds[wide], allowed=kinds[not wide]
                )

    @torch.no_grad()
    def restore(self, saved: SavedTable, weights_only: bool) -> None:
        """Copy what `read` returned into the parts of this process."""
        padding = self.collection.tables[self.name].padding_id
        for part in self.parts:
            if part.storage is not None:
                rows = SavedPart(saved, part, padding, weights_only=weights_only)
                part.storage.restore(self.name, rows, weights_only=weights_only)


class SavedPart:
    """The rows of a part of a table, as a checkpoint has them; see `viviane.embedding.state.SavedRows`.

    Args:
        saved: the table in the checkpoint.
        part: the part of this process.
        padding: the key whose row stays zero.
        weights_only: leave out what only training needs.
    """

    def __init__(
        self, saved: SavedTable, part: TablePart, padding: int | None = None, *, weights_only: bool = False
    ) -> None:
        self._saved, self._part, self._left_out = saved, part, _FOR_TRAINING if weights_only else ()
        self.step = saved.entry.step
        self.padding_row = part.keys.index(padding) if padding is not None and padding in part.keys else None

    def content(self) -> dict[str, Tensor]:
        """Return all tensors by name, of a dynamic table."""
        return {name: one for name, one in self._saved.content().items() if not name.startswith(self._left_out)}

    def copy_to(self, name: str, target: Tensor, first: int = 0) -> None:
        """Fill a tensor with the rows of a column from `first` on."""
        part = self._part
        self._saved.copy_to(name, target, part.keys[first : first + len(target)], part.start, part.stop)


def table_files(module: nn.Module) -> list[TableFile]:
    """Return every table of a module."""
    return [
        TableFile(f"{prefix}.{name}" if prefix else name, collection, name)
        for prefix, collection in collections_of(module).items()
        for name in collection.tables
    ]
