"""Where training stands, besides the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from viviane.training.saved_table import SavedTable


@dataclass
class Progress:
    """Where training stood, besides the weights.

    Args:
        step, epoch: counts of finished steps and epochs.
        values: plain data: reader position, early stopping, chosen precision, ...
        tensors: states of the random generators and sums that JSON cannot hold to the bit.
        history: rows of metrics.
        tables: of a checkpoint that was loaded: its tables, by "<collection>.<table>".
    """

    step: int = 0
    epoch: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, SavedTable] = field(default_factory=dict)
