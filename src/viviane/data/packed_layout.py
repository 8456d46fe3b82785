"""The layout of a batch in memory, from the decoded rows of a file to the tensors on a device.

A batch is a few matrices of equally many rows: labels, dense values, one-hot ids, sample weights, and the ids and
weights of bags. `PackedLayout` derives them from a schema. Two back ends gather the rows of a batch into that layout:
`host_gather` on reader threads, `device_shuffle` on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from viviane.batch import Bag, Batch, Layout
from viviane.data.buffers import ALIGNED, Form
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


class PackedLayout:
    """The matrices of a schema's batches, and how they are packed into one allocation.

    Bags are matrices only where every bag column has a fixed hotness: the shapes of a batch are then static, and
    `form` describes a *stack*, in which the position of every row is known without reading the bags.

    Args:
        schema: the columns.

    Attributes:
        columns: which column stands where in a batch.
        plain: labels (B, L), dense values (B, N), one-hot ids (B, F), and sample weights (B, 1) if there are any.
        bags: the type of each bag column's ids.

    Example:
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> layout = PackedLayout(schema)
        >>> layout.from_stack(torch.arange(128, dtype=torch.int32), 2).one_hot.tolist()
        [[64], [65]]
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.columns = Layout.of(schema)
        self.plain = [
            Matrix(len(schema.labels), torch.float32),
            Matrix(schema.num_dense, torch.float32),
            Matrix(len(schema.one_hot), one_hot_type(schema)),
        ]
        if schema.sample_weight is not None:
            self.plain.append(Matrix(1, torch.float32))
        self.bags: dict[str, torch.dtype] = {column.name: getattr(torch, column.dtype) for column in schema.bags}
        self._offsets_by_device: dict[torch.device, Tensor] = {}  # different hotness values, (H, 1)

    @property
    def dynamic_shape_reason(self) -> str | None:
        """Why the shapes of batches are not static; None if they are."""
        loose = [column.name for column in self.schema.bags if column.hotness is None]
        return f"bags of column {loose[0]!r} have no fixed hotness" if loose else None

    # Static shapes ------------------------------------------------------------------------------------------

    @cached_property
    def hotness(self) -> dict[str, int]:
        """Ids per row of each bag column."""
        return {column.name: column.hotness or 0 for column in self.schema.bags}

    @cached_property
    def matrices(self) -> list[Matrix]:
        """All matrices of a stack: the plain ones, then the ids and the weights of each bag column."""
        found = list(self.plain)
        for column in self.schema.bags:
            found.append(Matrix(self.hotness[column.name], self.bags[column.name], column.name))
            if column.weights is not None:
                found.append(Matrix(self.hotness[column.name], torch.float32, column.name))
        return found

    @cached_property
    def form(self) -> StackForm:
        """Positions of the matrices in a stack."""
        return StackForm([matrix.words for matrix in self.matrices])

    @property
    def row_bytes(self) -> int:
        """Bytes per row, including its row number."""
        return (self.form.row_words + 1) * _WORD

    def can_be_sliced(self, rows: int) -> bool:
        """Return whether batches of this many rows can be aligned slices of shared tensors."""
        return rows > 0 and all(rows * words * _WORD % ALIGNED == 0 for words in self.form.widths)

    def from_stack(self, stack: Tensor, num_rows: int) -> Batch:
        """Return the batch whose rows are in a stack, as views."""
        tensors = [
            self.form.matrix(stack, number, num_rows).view(matrix.dtype) for number, matrix in enumerate(self.matrices)
        ]
        count = len(self.plain)
        return self.batch(tensors[:count], self._bags(tensors[count:], num_rows, stack.device))

    def _bags(self, tensors: list[Tensor], num_rows: int, device: torch.device) -> Mapping[str, Bag]:
        if not self.bags:
            return {}
        offsets = self._offsets(num_rows, device)
        found: dict[str, Bag] = {}
        for matrix, numbers in zip(self.matrices[len(self.plain) :], tensors, strict=True):
            before = found.get(matrix.bag)
            if before is None:
                found[matrix.bag] = Bag(numbers.reshape(-1), offsets[matrix.width])
            else:
                found[matrix.bag] = Bag(before.values, before.offsets, numbers.reshape(-1))
        return found

    def _offsets(self, num_rows: int, device: torch.device) -> dict[int, Tensor]:
        """Return the offsets of bags by hotness, all in one allocation."""
        different = self._offsets_by_device.get(device)
        if different is None:
            numbers = torch.tensor(sorted(set(self.hotness.values())), dtype=torch.int64)
            different = self._offsets_by_device[device] = numbers.view(-1, 1).to(device)
        # Each tensor begins at a multiple of 256 bytes.
        rows = torch.arange(-(-(num_rows + 1) // 32) * 32, dtype=torch.int64, device=device)
        begins = (different * rows)[:, : num_rows + 1]
        return dict(zip(sorted(set(self.hotness.values())), begins.unbind(), strict=True))

    # Any shapes ---------------------------------------------------------------------------------------------

    def forms(self, num_rows: int, nnz: Mapping[str, int], weighted: Mapping[str, bool]) -> Iterator[Form]:
        """Yield the shapes and types of a batch's tensors, in the order in which they are created.

        Args:
            num_rows: rows of the batch.
            nnz: ids of each bag column.
            weighted: whether the ids of a bag column have weights.
        """
        for matrix in self.plain:
            yield (num_rows, matrix.width), matrix.dtype
        for name, dtype in self.bags.items():
            yield (num_rows + 1,), torch.int64
            yield (nnz[name],), dtype
            if weighted[name]:
                yield (nnz[name],), torch.float32

    def batch(self, plain: list[Tensor], bags: Mapping[str, Bag], origin: str = "") -> Batch:
        """Return a batch of the plain matrices and the bags."""
        labels, dense, one_hot, *weight = plain
        return Batch(self.columns, labels, dense, one_hot, bags, weight[0].view(-1) if weight else None, origin)


def one_hot_type(schema: Schema) -> torch.dtype:
    """Return the type of the one-hot matrix: int64 if a column needs it."""
    return torch.int64 if any(column.dtype == "int64" for column in schema.one_hot) else torch.int32
