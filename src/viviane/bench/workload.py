"""Workloads: sizes of tables, and batches of one-hot ids.

Shapes: B rows of a batch, F tables, each with one id per row, D their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, get_args

import numpy as np
import torch
from torch import Tensor

from viviane.config.optimizers import AdaGrad, AnyOptimizer
from viviane.core.errors import ConfigError, suggest
from viviane.ops.row_update import state_row_bytes

TABLE_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "criteo-kaggle": (
        1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
        27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
    ),
    "criteo-terabyte": (
        39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
        2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
    ),
    "movielens-20m": (138493, 26744),
}  # fmt: skip
"""Rows of each table, for public data sets."""

RULES: Final[dict[str, AnyOptimizer]] = {
    **{settings.model_fields["type"].default: settings() for settings in get_args(AnyOptimizer)},
    "row_wise_adagrad": AdaGrad(row_wise=True),
}
"""Optimizers that can be measured."""

LAWS: Final = ("power-law", "uniform")
NUM_BATCHES: Final = 8
"""Number of batches used in turn, so that no cache keeps the rows of one."""


@dataclass(frozen=True)
class Tables:
    """Float32 tables of one width, and their optimizer.

    Args:
        rows: rows of each table.
        dim: D.
        rule: optimizer, a name in `RULES`.
        device: device of the tables.
        lr: learning rate.
    """

    rows: tuple[int, ...]
    dim: int
    rule: str
    device: torch.device
    lr: float = 0.01

    @property
    def state_bytes_per_row(self) -> int:
        """Bytes of optimizer state per row."""
        return state_row_bytes(RULES[self.rule], self.dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows and their optimizer state."""
        return sum(self.rows) * (4 * self.dim + self.state_bytes_per_row)


@dataclass(frozen=True)
class Load:
    """Batches and the gradient of each one's output.

    Args:
        ids: (B, F) each, int32, counted per table.
        gradient: (B, F * D), float32.
    """

    ids: list[Tensor]
    gradient: Tensor

    @property
    def size(self) -> int:
        """B."""
        return int(self.gradient.shape[0])

    @property
    def num_ids(self) -> int:
        """B * F."""
        return self.ids[0].numel()

    @cached_property
    def distinct_rows(self) -> float:
        """Number of distinct rows of a batch; the mean over the batches."""
        counts = [sum(len(torch.unique(column)) for column in ids.unbind(1)) for ids in self.ids]
        return sum(counts) / len(counts)


def draw_ids(
    rows: Sequence[int], size: int, law: str, exponent: float = 1.1, count: int = NUM_BATCHES, seed: int = 0
) -> list[Tensor]:
    """Draw batches (B, F) of int32 ids: P(id) ~ (id + 1)^-exponent by inverting the continuous law, or uniform.

    Args:
        rows: rows of each table.
        size: B.
        law: "power-law" or "uniform".
        exponent: exponent of the power law, not 1.
        count: number of batches.
        seed: seed of the ids.

    Example:
        >>> [ids] = draw_ids([1000, 3], 4, "power-law", count=1)
        >>> tuple(ids.shape), bool((ids < torch.tensor([1000, 3])).all())
        ((4, 2), True)
    """
    if law not in LAWS:
        raise ConfigError("unknown distribution of ids", value=law, allowed=", ".join(LAWS))
    if law == "power-law" and (exponent <= 0 or exponent == 1):
        raise ConfigError("the exponent of a power law must be positive and not 1", value=exponent)
    rng, limit = np.random.default_rng(seed), np.array(rows, dtype=np.float64)
    batches = []
    for _ in range(count):
        u = rng.random((size, len(limit)))
        if law == "power-law":
            power = 1 - exponent
            u = ((1 + u * ((limit + 1) ** power - 1)) ** (1 / power) - 1) / limit
        batches.append(torch.from_numpy(np.clip(np.floor(u * limit), 0, limit - 1).astype(np.int32)))
    return batches


@dataclass(frozen=True)
class Draw:
    """The distribution of batches.

    Args:
        size: B.
        law: "power-law" or "uniform".
        exponent: exponent of the power law.
    """

    size: int
    law: str = "power-law"
    exponent: float = 1.1

    def load(self, tables: Tables) -> Load:
        """Draw batches for tables, on their device."""
        ids = [one.to(tables.device) for one in draw_ids(tables.rows, self.size, self.law, self.exponent)]
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(self.size, len(tables.rows) * tables.dim, generator=generator) * 1e-3
        return Load(ids, gradient.to(tables.device))


def lookup_bytes(tables: Tables, load: Load) -> float:
    """Return the minimum bytes of a lookup: U D 4 + N 4 + N D 4.

    U distinct rows are read once, N ids are read, N vectors are written. Caches are assumed to keep a row within a
    batch, and to keep none between lookup and update.
    """
    return 4 * (load.distinct_rows * tables.dim + load.num_ids * (1 + tables.dim))


def step_bytes(tables: Tables, load: Load) -> float:
    """Return the bytes of lookup, backward and update: the lookup's + N D 4 + U (2 D 4 + 2 S).

    N gradients are read; U distinct rows of 4 D bytes and their S bytes of state are read and written.
    """
    row = 4 * tables.dim + tables.state_bytes_per_row
    return lookup_bytes(tables, load) + 4 * load.num_ids * tables.dim + 2 * load.distinct_rows * row


def known_rule(name: str) -> str:
    """Return the name of an optimizer; raise an error with the valid names if it is unknown."""
    if name not in RULES:
        raise ConfigError("unknown optimizer", where="--optimizer", value=name, fix=suggest(name, RULES))
    return name
