"""The layout of a stack: all matrices of a batch in one allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.data.block import one_hot_type
from viviane.data.buffers import ALIGNED
from viviane.ops.row_stacks import StackForm
from viviane.schema import Schema

_WORD: Final = 4  # bytes


@dataclass(frozen=True)
class Matrix:
    """A matrix of a batch: elements per row and their type; `bag` is the column of its ids or weights."""

    width: int
    dtype: torch.dtype
    bag: str = ""

    @property
    def words(self) -> int:
        """Four-byte words per row."""
        return self.width * self.dtype.itemsize // _WORD


class BatchStack:
    """The layout of stacked batches of a schema; every bag has its column's hotness.

    Args:
        schema: the columns; `ineligible_reason` is None.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> stack = BatchStack(schema)
        >>> stack.batch(torch.arange(128, dtype=torch.int32), 2).one_hot.tolist()
        [[64], [65]]
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.layout = Layout.of(schema)
        ids = torch.int64 if one_hot_type(schema) is np.int64 else torch.int32
        self.matrices = [
            Matrix(len(schema.labels), torch.float32),
            Matrix(schema.num_dense, torch.float32),
            Matrix(len(schema.one_hot), ids),
        ]
        if schema.sample_weight is not None:
            self.matrices.append(Matrix(1, torch.float32))
        self.num_plain = len(self.matrices)
        self.hotness = {column.name: column.hotness or 0 for column in schema.bags}
        for column in schema.bags:
            self.matrices.append(Matrix(column.hotness or 0, getattr(torch, column.dtype), column.name))
            if column.weights is not None:
                self.matrices.append(Matrix(column.hotness or 0, torch.float32, column.name))
        self.form = StackForm([matrix.words for matrix in self.matrices])
        self._different: dict[torch.device, Tensor] = {}  # hotness values, (H, 1)

    @staticmethod
    def ineligible_reason(schema: Schema) -> str | None:
        """Return why batches of a schema cannot be stacked; None if they can."""
        loose = [column.name for column in schema.bags if column.hotness is None]
        return f"bags of column {loose[0]!r} have no fixed hotness" if loose else None

    @property
    def row_bytes(self) -> int:
        """Bytes per row, including its row number."""
        return (self.form.row_words + 1) * _WORD

    def can_be_cut(self, rows: int) -> bool:
        """Return whether batches of this many rows can be aligned slices of shared tensors."""
        return rows > 0 and all(rows * words * _WORD % ALIGNED == 0 for words in self.form.widths)

    def batch(self, stack: Tensor, num_rows: int) -> Batch:
        """Return the batch whose rows are in a stack, as views."""
        tensors = [
            self.form.matrix(stack, number, num_rows).view(matrix.dtype) for number, matrix in enumerate(self.matrices)
        ]
        return Batch(
            layout=self.layout,
            labels=tensors[0],
            dense=tensors[1],
            one_hot=tensors[2],
            weight=tensors[3].view(-1) if self.num_plain > 3 else None,
            bags=self._bags(tensors[self.num_plain :], num_rows, stack.device),
        )

    def _offsets(self, num_rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return the offsets of bags by hotness, all in one allocation."""
        different = self._different.get(device)
        if different is None:
            numbers = torch.tensor(sorted(set(self.hotness.values())), dtype=torch.int64)
            different = self._different[device] = numbers.view(-1, 1).to(device)
        # Each tensor begins at a multiple of 256 bytes.
        rows = torch.arange(-(-(num_rows + 1) // 32) * 32, dtype=torch.int64, device=device)
        begins = (different * rows)[:, : num_rows + 1]
        return dict(zip(sorted(set(self.hotness.values())), begins.unbind(), strict=True))

    def _bags(self, tensors: list[Tensor], num_rows: int, device: torch.device) -> Mapping[str, Bag]:
        if not self.hotness:
            return {}
        offsets = self._offsets(num_rows, device)
        found: dict[str, Bag] = {}
        for matrix, numbers in zip(self.matrices[self.num_plain :], tensors, strict=True):
            before = found.get(matrix.bag)
            if before is None:
                found[matrix.bag] = Bag(numbers.reshape(-1), offsets[matrix.width])
            else:
                found[matrix.bag] = Bag(before.values, before.offsets, numbers.reshape(-1))
        return found
