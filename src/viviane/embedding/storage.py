"""One storage for all tables of one width: rows, optimizer state, and the gradients that wait for a step.

Shapes: R rows of all tables together, D their width, N entries, M gradient vectors, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import ConfigError
from viviane.embedding.config import TableConfig
from viviane.embedding.initializers import fill_initial
from viviane.embedding.row_mean import RowMean
from viviane.ops.sparse_update import adagrad_update, adam_update, sgd_update, sum_duplicates

Optimizer = SGD | AdaGrad | Adam


@dataclass(frozen=True)
class RowGradients:
    """Gradients of one backward pass: entry n of row rows[n] has weights[n] * gradients[sources[n]].

    Args:
        rows: (N,), int64, rows of the storage.
        gradients: (M, D).
        sources: (N,), int64, or None where entry n has gradient n.
        weights: (N,), float32, or None for ones.
        tables: names of the tables that took part.
    """

    rows: Tensor
    gradients: Tensor
    sources: Tensor | None
    weights: Tensor | None
    tables: frozenset[str]


@dataclass(frozen=True)
class Segment:
    """Neighbouring tables of a storage with one optimizer: storage rows start to stop."""

    start: int
    stop: int
    optimizer: Optimizer | None
    tables: tuple[str, ...]


class Storage(nn.Module):
    """The rows of all tables of one width, with a last row that is always zero.

    Args:
        tables: all of one dim.
        optimizer: the rule of tables without their own.
        seed: of the initial values.
    """

    weight: Tensor
    still_rows: Tensor

    def __init__(self, tables: Sequence[TableConfig], optimizer: Optimizer, device: torch.device, seed: int) -> None:
        super().__init__()
        rules = [table.optimizer or optimizer if table.trainable else None for table in tables]
        order = sorted(range(len(tables)), key=lambda i: rules.index(rules[i]))  # tables of one rule are neighbours
        self.tables = {tables[i].name: tables[i] for i in order}
        self.dim = tables[0].dim
        self.bases: dict[str, int] = {}
        self.segments: list[Segment] = []
        self.steps = dict.fromkeys(self.tables, 0)
        start = 0
        for i in order:
            table = tables[i]
            self.bases[table.name] = start
            stop = start + table.num_rows
            if self.segments and self.segments[-1].optimizer == rules[i]:
                last = self.segments.pop()
                self.segments.append(Segment(last.start, stop, last.optimizer, (*last.tables, table.name)))
            else:
                self.segments.append(Segment(start, stop, rules[i], (table.name,)))
            start = stop
        self.null_row = start
        self._allocate(device, seed)
        self._pending: list[RowGradients] = []
        self._summed: tuple[Tensor, Tensor] | None = None
        self.row_mean: RowMean | None = None

    def _allocate(self, device: torch.device, seed: int) -> None:
        self.register_buffer(
            "weight", torch.empty(self.null_row + 1, self.dim, dtype=torch.float32, device=device), persistent=False
        )
        self.weight[self.null_row] = 0.0
        for name, table in self.tables.items():
            fill_initial(self.table_rows(name), table, seed)
        for i, segment in enumerate(self.segments):
            for state_name, value in _initial_state(segment.optimizer).items():
                shape = (segment.stop - segment.start, self.dim)
                state = torch.full(shape, value, dtype=torch.float32, device=device)
                self.register_buffer(f"{state_name}_{i}", state, persistent=False)
        still = [self.bases[name] + t.padding_id for name, t in self.tables.items() if t.padding_id is not None]
        # Rows that are zero for ever; sorted, as searchsorted wants them beside the sorted touched rows.
        self.register_buffer("still_rows", torch.tensor(sorted(still), dtype=torch.int64, device=device), False)

    def table_rows(self, name: str) -> Tensor:
        """Return the view (num_rows, dim) of a table."""
        start = self.bases[name]
        return self.weight[start : start + self.tables[name].num_rows]

    def table_state(self, name: str) -> dict[str, Tensor]:
        """Return the views (num_rows, dim) of a table's optimizer state."""
        i, segment = next((i, one) for i, one in enumerate(self.segments) if name in one.tables)
        start = self.bases[name] - segment.start
        stop = start + self.tables[name].num_rows
        return {state: self._state(i, state)[start:stop] for state in _initial_state(segment.optimizer)}

    def reset_table_state(self, name: str) -> None:
        """Put a table's optimizer state back to its beginning."""
        segment = next(one for one in self.segments if name in one.tables)
        initial = _initial_state(segment.optimizer)
        for state_name, state in self.table_state(name).items():
            state.fill_(initial[state_name])
        self.steps[name] = 0

    def clear_padding(self, name: str) -> None:
        """Make a table's padding row zero, as it stays."""
        padding = self.tables[name].padding_id
        if padding is not None:
            self.table_rows(name)[padding] = 0.0

    def _state(self, segment: int, name: str) -> Tensor:
        state: Tensor = self.get_buffer(f"{name}_{segment}")
        return state

    def add_gradients(self, gradients: RowGradients) -> None:
        """Keep the gradients of a backward pass until the next step."""
        self._pending.append(gradients)
        self._summed = None

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for a step."""
        return bool(self._pending)

    def discard_gradients(self) -> None:
        """Drop the gradients that wait."""
        self._pending.clear()
        self._summed = None

    def summed_gradients(self) -> tuple[Tensor, Tensor]:
        """Return the touched rows, (U,), rising, and their gradients summed over all that waits, (U, D)."""
        if self._summed is None:
            rows, sums = sum_duplicates(*_joined(self._pending), num_rows=self.null_row + 1)
            if len(self.still_rows) and len(rows):
                places = torch.searchsorted(rows, self.still_rows).clamp_(max=len(rows) - 1)
                sums[places[rows[places] == self.still_rows]] = 0.0
            stop = torch.searchsorted(rows, self.null_row)
            self._summed = rows[:stop], sums[:stop]
        return self._summed

    def step(self, lr: float, factor: float, scale: float | Tensor) -> None:
        """Apply each segment's rule to the touched rows, and drop the gradients."""
        if not self._pending:
            return
        active = frozenset().union(*(one.tables for one in self._pending))
        for name in active:
            self.steps[name] += 1
        rows, sums = self.summed_gradients()
        if not (isinstance(scale, float | int) and scale == 1.0):
            sums = sums * scale
        bounds = torch.tensor([segment.stop for segment in self.segments], device=rows.device)
        cuts = [0, *torch.searchsorted(rows, bounds).tolist()]
        before = None if self.row_mean is None else self.weight.index_select(0, rows)
        for i, segment in enumerate(self.segments):
            a, b = cuts[i], cuts[i + 1]
            if segment.optimizer is not None and a < b:
                rate = lr if segment.optimizer.lr is None else segment.optimizer.lr * factor
                self._update(i, rows[a:b] - segment.start if segment.start else rows[a:b], sums[a:b], rate)
        if self.row_mean is not None and before is not None:
            self.row_mean.visit(rows, before, self.weight.index_select(0, rows))
        self.discard_gradients()

    def _update(self, index: int, rows: Tensor, sums: Tensor, lr: float) -> None:
        segment = self.segments[index]
        rule = segment.optimizer
        weight = self.weight[segment.start : segment.stop]
        if isinstance(rule, SGD):
            sgd_update(weight, rows, sums, lr=lr, weight_decay=rule.weight_decay)
        elif isinstance(rule, AdaGrad):
            adagrad_update(
                weight,
                self._state(index, "accumulator"),
                rows,
                sums,
                lr=lr,
                epsilon=rule.epsilon,
                weight_decay=rule.weight_decay,
            )
        elif isinstance(rule, Adam):
            adam_update(
                weight,
                self._state(index, "m"),
                self._state(index, "v"),
                rows,
                sums,
                lr=lr,
                beta1=rule.beta1,
                beta2=rule.beta2,
                epsilon=rule.epsilon,
                step=self._ages(segment, rows),
                weight_decay=rule.weight_decay,
            )

    def _ages(self, segment: Segment, rows: Tensor) -> int | Tensor:
        steps = [self.steps[name] for name in segment.tables]
        if len(set(steps)) == 1:
            return steps[0]
        starts = torch.tensor([self.bases[name] - segment.start for name in segment.tables], device=rows.device)
        table = torch.searchsorted(starts, rows, right=True) - 1
        return torch.tensor(steps, device=rows.device)[table]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ConfigError(
                "embedding tables are float32 and cannot be converted",
                allowed="float32",
                fix="convert the dense layers alone, or train under torch.autocast",
            )
        if self._pending:
            raise ConfigError("gradients wait for a step", fix="call step() or discard_gradients() before moving")
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _initial_state(optimizer: Optimizer | None) -> dict[str, float]:
    if isinstance(optimizer, AdaGrad):
        return {"accumulator": optimizer.initial_accumulator}
    return {"m": 0.0, "v": 0.0} if isinstance(optimizer, Adam) else {}


def _joined(pending: Sequence[RowGradients]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Join passes and parts into one list of entries; a gradient matrix that parts share stays one."""
    if len(pending) == 1:
        one = pending[0]
        return one.rows, one.gradients, one.sources, one.weights
    matrices: list[Tensor] = []
    sources: list[Tensor] = []
    start = 0
    for one in pending:
        if not matrices or one.gradients is not matrices[-1]:
            start += len(matrices[-1]) if matrices else 0
            matrices.append(one.gradients)
        entries = torch.arange(len(one.rows), device=one.rows.device) if one.sources is None else one.sources
        sources.append(entries + start)
    weights = None
    if any(one.weights is not None for one in pending):
        weights = torch.cat(
            [torch.ones(len(p.rows), device=p.rows.device) if p.weights is None else p.weights for p in pending]
        )
    gradients = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    return torch.cat([one.rows for one in pending]), gradients, torch.cat(sources), weights
