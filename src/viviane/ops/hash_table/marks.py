"""Of several values of a row the last one counts."""

from __future__ import annotations

import torch
from torch import Tensor


class Marks:
    """Finds the last entry of each row; kept from call to call where that saves work."""

    def assign(self, table: Tensor, rows: Tensor, values: Tensor) -> None:
        """Give rows the values of their last entries; rows below zero are passed over.

        Args:
            table: (R, D).
            rows: (N,), int64.
            values: (N, D), rounded to the table's type.

        Example:
            >>> table = torch.zeros(2, 1)
            >>> Marks().assign(table, torch.tensor([0, -1, 0]), torch.tensor([[1.0], [2.0], [3.0]]))
            >>> table.tolist()
            [[3.0], [0.0]]
        """
        entries = torch.arange(len(rows), device=rows.device)
        last = torch.full((len(table),), -1, device=rows.device) if len(table) <= 4 * len(rows) else None
        there = rows >= 0
        if last is None:
            own, places = torch.unique(rows[there], return_inverse=True)
            last = torch.zeros_like(own).scatter_reduce_(0, places, entries[there], "amax")
        else:
            last.scatter_reduce_(0, rows[there], entries[there], "amax")
            own = (last >= 0).nonzero().squeeze(1)
            last = last[own]
        table[own] = values[last].to(table.dtype)
