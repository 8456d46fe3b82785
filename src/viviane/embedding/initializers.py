"""Initial values of tables: a function of seed, table and key, the same whatever order, device or rank makes a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from viviane.core.seeds import derive_seed
from viviane.embedding.config import ConstantInit, InitSettings, NormalInit, TableConfig, UniformInit, XavierInit
from viviane.ops.hash_table import initial_rows

_PIECE_ELEMENTS = 1 << 22

Law = tuple[str, float, float]


def law_of(init: InitSettings, num_rows: int, dim: int) -> Law:
    """Return the law of initial values and its two numbers, as `viviane.ops.hash_table.initial_rows` takes them.

    Example:
        >>> law_of(XavierInit(), num_rows=4, dim=2)
        ('uniform', -1.0, 1.0)
    """
    if isinstance(init, NormalInit):
        return "normal", init.mean, init.std
    if isinstance(init, XavierInit):
        bound = math.sqrt(6 / (num_rows + dim))
        return "uniform", -bound, bound
    if isinstance(init, UniformInit):
        bound = min(0.05, math.sqrt(1 / num_rows))
        return "uniform", -bound if init.low is None else init.low, bound if init.high is None else init.high
    return "constant", init.value if isinstance(init, ConstantInit) else 0.0, 0.0


def table_seed(seed: int, table: str) -> int:
    """Return the seed of a table's initial values."""
    return derive_seed(seed, "table", table)


def fill_initial(weight: Tensor, table: TableConfig, seed: int) -> None:
    """Fill a table's rows in place, on its device.

    Args:
        weight: (num_rows, dim), contiguous.
        table: its settings; the padding row becomes zero.
        seed: of the run.
    """
    kind, a, b = law_of(table.init, table.num_rows, table.dim)
    if kind == "constant":
        weight.fill_(a)
    else:
        own = table_seed(seed, table.name)
        piece = max(1, _PIECE_ELEMENTS // table.dim)
        for start in range(0, table.num_rows, piece):
            keys = torch.arange(start, min(start + piece, table.num_rows), device=weight.device)
            initial_rows(weight, keys, keys, kind, a, b, own)
    if table.padding_id is not None:
        weight[table.padding_id] = 0.0
