"""Increments of dynamic tables: the keys that were used, added or changed since a base, by their rows.

A file of such an increment has what that of a whole table has: "keys", "rows", rising, "weight", "stamps", "uses" and
"state.<name>" of the changed keys alone, and all of "free", "counters" and "admission.<name>". The table has
num_rows + F rows, F of them free. Each other row has the key of the newest file that names the row: a row that was
given back is among the free ones until it is named again, and a row whose key was evicted is named with its new key.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import CheckpointError
from viviane.ops.hash_table import MappedFile
from viviane.training.checkpoint.manifest import KEYS, ShardEntry
from viviane.training.checkpoint.saved_table import STATE, SavedTable

_FREE, _ROWS = "free", "rows"
_OF_KEYS: Final = (KEYS, "weight", "stamps", "uses")
_IN_MEMORY: Final = 64 << 20
"""Bytes of a column; a larger one is put together in a file, since the table may be larger than memory."""
_PIECE: Final = 8 << 20


class IncrementedKeys(SavedTable):
    """A dynamic table with the keys of increments over those of a whole table.

    Args:
        layers: the whole table and all increments after it, the newest last.
    """

    def __init__(self, layers: Sequence[SavedTable]) -> None:
        super().__init__(layers[-1].folder, layers[-1].entry)
        self._layers = list(layers)

    def tensors(self, shard: ShardEntry) -> dict[str, Tensor]:
        """Return all tensors of the table.

        Raises:
            CheckpointError: those of an increment do not continue those of its bases.
        """
        return self._content

    @cached_property
    def _content(self) -> dict[str, Tensor]:
        found = [one.content() for one in self._layers]
        every = {name for one in found for name in one}
        names = sorted(name for name in every if name in _OF_KEYS or name.startswith(STATE))
        for layer, tensors in zip(self._layers, found, strict=True):
            self._check_layer(layer, tensors, found[0], names)
        rows, owners, places = self._newest(found)
        merged = {
            name: self._merge([one[name] for one in found], owners, places) if name in names else part
            for name, part in found[-1].items()
        }
        return {**merged, _ROWS: rows}

    def _newest(self, found: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows with keys, rising, the layer that has the newest of each, and its place there."""
        free, known = found[-1][_FREE], sum(len(one[KEYS]) for one in found)
        if self.num_rows > known:
            raise self._wrong("the files of a dynamic table have fewer keys than its manifest says", self.num_rows,
                              f"at most {known}")  # fmt: skip
        count = self.num_rows + len(free)
        if len(free) and (int(free.min()) < 0 or int(free.max()) >= count or len(torch.unique(free)) != len(free)):
            raise self._wrong(
                "the free rows of an increment are not distinct rows of its table", _FREE, f"0 to {count - 1}"
            )
        owners, places = torch.full((count,), -1, dtype=torch.int32), torch.zeros(count, dtype=torch.int64)
        for number, one in enumerate(found):
            inside = (one[_ROWS] < count).nonzero().view(-1)  # a table that was cleared has fewer rows than before
            owners[one[_ROWS][inside]], places[one[_ROWS][inside]] = number, inside
        last = found[-1][_ROWS]
        in_use = torch.ones(count, dtype=torch.bool)
        in_use[free] = False
        if len(last) and (int(last[-1]) >= count or not bool(in_use[last].all())):
            raise self._wrong("an increment has keys in free rows, or beyond its rows", _ROWS, f"0 to {count - 1}")
        rows = in_use.nonzero().view(-1)
        if bool((owners[rows] < 0).any()):
            row = int(rows[owners[rows] < 0][0])
            raise self._wrong("a row of an increment has its key in none of its bases", f"row {row}", "rows of a base")
        return rows, owners[rows], places[rows]

    def _check_layer(
        self, layer: SavedTable, tensors: dict[str, Tensor], whole: dict[str, Tensor], names: list[str]
    ) -> None:
        count, where = len(tensors[KEYS]), f"{layer.folder / layer.entry.files[0]}"
        for name in (_ROWS, _FREE):
            part = tensors.get(name)
            if part is None or part.dim() != 1 or part.dtype != torch.int64:
                raise self._wrong("rows of a dynamic table are no vector of int64", name, "int64", where)
        rows = tensors[_ROWS]
        if len(rows) != count or not bool((rows.diff() > 0).all()) or (count and int(rows[0]) < 0):
            raise self._wrong("the rows of a dynamic table's keys do not rise, or are not one for each key", _ROWS,
                              f"{count} rows from 0", where)  # fmt: skip
        for name in names:
            part, first = tensors.get(name), whole.get(name)
            if part is None or first is None or part.dtype != first.dtype or part.shape != (count, *first.shape[1:]):
                value = f"{name}: {'absent' if part is None else tuple(part.shape)}"
                allowed = "absent" if first is None else f"{(count, *first.shape[1:])} of {first.dtype}"
                raise self._wrong("the table of a base has another form", value, allowed, where)

    def _merge(self, parts: list[Tensor], owners: Tensor, places: Tensor) -> Tensor:
        """Return the newest entries of a column, by rising row."""
        tail = parts[0].shape[1:]
        row_bytes = max(1, tail.numel() * parts[0].element_size())
        merged = _empty(len(owners), tail, parts[0].dtype)
        step = max(1, _PIECE // row_bytes)
        for first in range(0, len(owners), step):
            own, place, target = (
                owners[first : first + step],
                places[first : first + step],
                merged[first : first + step],
            )
            for number in torch.unique(own).tolist():
                here = (own == number).nonzero().view(-1)
                target[here] = parts[number][place[here]]
        return merged

    def _wrong(self, what: str, value: object, allowed: str, where: str | None = None) -> CheckpointError:
        found = where or str(self.folder / self.entry.files[0])
        return CheckpointError(what, where=found, value=value, allowed=allowed, fix="use another checkpoint")


def _empty(count: int, tail: torch.Size, dtype: torch.dtype) -> Tensor:
    numbers = count * tail.numel()
    if numbers * dtype.itemsize <= _IN_MEMORY or not hasattr(os, "posix_fallocate"):
        return torch.empty(count, *tail, dtype=dtype)
    file = MappedFile(numbers, dtype)
    file.allocate(0, numbers * dtype.itemsize)
    return file.tensor.view(count, *tail)
