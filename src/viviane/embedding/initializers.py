"""Initial values of a table, drawn on the CPU in pieces so that no temporary of the table's size is made."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from viviane.core.seeds import derive_seed
from viviane.embedding.config import ConstantInit, NormalInit, TableConfig, UniformInit, XavierInit

_PIECE_ELEMENTS = 1 << 22


def fill_initial(weight: Tensor, table: TableConfig, seed: int) -> None:
    """Fill a table's rows in place.

    The values depend on the seed and on the table's name and shape alone: not on the other tables, not on the
    device.

    Args:
        weight: (num_rows, dim), contiguous.
        table: its settings; the padding row becomes zero.
        seed: of the run.
    """
    init = table.init
    flat = weight.view(-1)
    if isinstance(init, UniformInit | XavierInit | NormalInit):
        generator = torch.Generator().manual_seed(derive_seed(seed, "table", table.name))
        for start in range(0, flat.numel(), _PIECE_ELEMENTS):
            piece = flat[start : start + _PIECE_ELEMENTS]
            in_place = piece.device.type == "cpu" and piece.dtype == torch.float32
            target = piece if in_place else torch.empty(piece.shape)
            if isinstance(init, NormalInit):
                target.normal_(init.mean, init.std, generator=generator)
            else:
                target.uniform_(*_bounds(init, table), generator=generator)
            if target is not piece:
                piece.copy_(target)
    else:
        flat.fill_(init.value if isinstance(init, ConstantInit) else 0.0)
    if table.padding_id is not None:
        weight[table.padding_id] = 0.0


def _bounds(init: UniformInit | XavierInit, table: TableConfig) -> tuple[float, float]:
    if isinstance(init, XavierInit):
        bound = math.sqrt(6 / (table.num_rows + table.dim))
        return -bound, bound
    if init.low is None or init.high is None:
        bound = min(0.05, math.sqrt(1 / table.num_rows))
        return -bound, bound
    return init.low, init.high
