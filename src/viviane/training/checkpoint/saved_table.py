"""Tables of a checkpoint, read by keys and columns, and the progress of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from viviane.core.errors import CheckpointError
from viviane.training.checkpoint.manifest import ShardEntry, TableEntry, overlap, positions
from viviane.training.checkpoint.tensor_files import read_tensors

STATE = "state."
MEAN = "mean"


class SavedTable:
    """Reads parts of a table. Files are memory-mapped, and only the accessed pages are read.

    Args:
        folder: the checkpoint.
        entry: the table's entry in the manifest.
    """

    def __init__(self, folder: Path, entry: TableEntry) -> None:
        self.folder, self.entry = folder, entry
        self.num_rows, self.dim = entry.weight.shape
        self.names = ("weight", *(STATE + name for name in entry.state), *((MEAN,) if entry.has_mean else ()))
        whole = (ShardEntry(file=entry.file or "", keys=(0, self.num_rows, 1), columns=(0, self.dim)),)
        self._shards = entry.shards or whole
        self._open: dict[str, dict[str, Tensor]] = {}

    def tensors(self, shard: ShardEntry) -> dict[str, Tensor]:
        """Map the file of a shard.

        Raises:
            CheckpointError: its tensors differ from the manifest.
        """
        if shard.file not in self._open:
            found = read_tensors(self.folder / shard.file)
            if self.entry.is_dynamic:
                self._check_dynamic(shard, found)
            else:
                self._check(shard, found)
            self._open[shard.file] = found
        return self._open[shard.file]

    def _check(self, shard: ShardEntry, found: dict[str, Tensor]) -> None:
        rows, columns = len(range(*shard.keys)), shard.columns[1] - shard.columns[0]
        for name in self.names:
            shape = tuple(found[name].shape) if name in found else None
            if shape != (rows, columns) and not (name != "weight" and shape == (rows,)):
                raise CheckpointError(
                    "a table's file does not match the manifest", where=f"{self.folder / shard.file}, {name}",
                    value=shape, allowed=str((rows, columns)),
                )  # fmt: skip

    def _check_dynamic(self, shard: ShardEntry, found: dict[str, Tensor]) -> None:
        keys = found.get("keys")
        count = len(keys) if self.entry.is_increment and keys is not None and keys.dim() else self.num_rows
        for name, shape in (("keys", (count,)), ("weight", (count, self.dim))):
            if name not in found or tuple(found[name].shape) != shape:
                raise CheckpointError(
                    "a table's file does not match the manifest", where=f"{self.folder / shard.file}, {name}",
                    value=tuple(found[name].shape) if name in found else "absent", allowed=str(shape),
                )  # fmt: skip

    def check_files(self) -> None:
        """Compare the shapes in the table's files with the manifest; rows are not read.

        Raises:
            CheckpointError: a file is missing, or its tensors differ from the manifest.
        """
        for shard in self._shards:
            self.tensors(shard)

    def content(self) -> dict[str, Tensor]:
        """Return all tensors of a table that has one file; for a dynamic table also its keys and their counters."""
        return self.tensors(self._shards[0])

    def meta(self, name: str) -> tuple[bool, torch.dtype]:
        """Return whether a tensor has one element per column, and its type."""
        tensor = self.tensors(self._shards[0])[name]
        return tensor.dim() == 2, tensor.dtype

    def copy_to(self, name: str, target: Tensor, keys: range, start: int, stop: int) -> None:
        """Fill a tensor with the rows of a range of keys and columns.

        Args:
            name: "weight", "state.<name>" or "mean".
            target: (len(keys), stop - start), or (len(keys),) for a state with one element per row.
            keys, start, stop: range of keys and columns.
        """
        for shard in self._shards:
            theirs = range(*shard.keys)
            both = overlap(keys, theirs)
            low, high = max(start, shard.columns[0]), min(stop, shard.columns[1])
            if not both or low >= high:
                continue
            source = self.tensors(shard)[name]
            to, of = positions(both, keys), positions(both, theirs)
            if target.dim() == 1:
                target[to].copy_(source[of])
            else:
                target[to, low - start : high - start].copy_(
                    source[of, low - shard.columns[0] : high - shard.columns[0]]
                )

    def read(self, name: str, keys: range, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a copy of the rows of a range of keys and columns."""
        wide, dtype = self.meta(name)
        end = self.dim if stop is None else stop
        target = torch.empty((len(keys), end - start) if wide else (len(keys),), dtype=dtype)
        self.copy_to(name, target, keys, start, end)
        return target


@dataclass
class Progress:
    """The position of training, and all of its state except the weights.

    Args:
        step, epoch: numbers of finished steps and epochs.
        values: plain data: reader position, early stopping, chosen precision, ...
        tensors: states of the random generators, and sums that JSON cannot represent exactly.
        history: rows of metrics.
        tables: tables of a loaded checkpoint, by "<collection>.<table>".
    """

    step: int = 0
    epoch: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, SavedTable] = field(default_factory=dict)
