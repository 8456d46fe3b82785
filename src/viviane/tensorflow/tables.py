"""A table behind a TensorFlow variable: its rows, its optimizer, what waits for an update.

Shapes: N keys, D numbers a row, B rows of the batch.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from viviane.batch import Bag
from viviane.config.optimizers import SGD, AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding import DynamicTable, DynamicTableConfig, FeatureConfig, TableCollection, TableConfig, TableState
from viviane.embedding.dynamic_content import DynamicContent
from viviane.embedding.external import ExternalLookups, LostUpdateError
from viviane.parallel.automatic import make_tables
from viviane.tensorflow.processes import group

_MOST_LOOKUPS: Final = 512
"""Of a step: all features of one table, over all batches whose gradients a script adds up."""
_FEATURES = {"sum": "sum", "mean": "mean"}


def _dynamic(collection: TableCollection, name: str) -> DynamicTable | None:
    return next((part.dynamic_table(name) for part in collection.parts() if name in part.tables), None)


def gathered(keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys (N,) and rows (N, D) of all processes, one below the other; all call it together."""
    every = group().gather(rows.reshape(-1))
    return torch.cat(group().gather(keys)), torch.cat(every).reshape(-1, rows.shape[1])


@dataclass
class Table:
    """A table of one variable.

    Args:
        config: its settings.
        process: the one that has the table; None: all have rows of it, key k is on k mod n. A dynamic table is on one.
        seed: of initial values.
    """

    config: TableConfig | DynamicTableConfig
    process: int | None = None
    seed: int = 0
    rule: AnyOptimizer | None = None
    lookups: ExternalLookups = field(init=False)
    _early: dict[int, Mapping[str, Bag]] = field(default_factory=dict)  # looked up again when their gradient came
    _numbers: dict[int, tuple[int, Mapping[str, Bag]]] = field(default_factory=dict)  # that of `lookups`, and the batch
    _ended: dict[int, Tensor] = field(default_factory=dict)
    _seen: dict[int, Tensor] = field(default_factory=dict)  # gradients since the first lookup of the step
    _next: int = 0
    _times: list[tuple[float, int]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.lookups = self._make(SGD())

    @property
    def collection(self) -> TableCollection:
        """The rows."""
        return self.lookups.collection

    @property
    def dynamic(self) -> DynamicTable | None:
        """The dynamic table; None in a process that does not have it.

        Raises:
            ConfigError: rows are fixed.
        """
        if not isinstance(self.config, DynamicTableConfig):
            raise ConfigError("the variable is not dynamic", where=self.config.name, fix="use a DynamicVariable")
        return _dynamic(self.collection, self.config.name)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the table's files: the one that has a dynamic table, else the first."""
        return self.dynamic is not None if self.is_dynamic else group().rank == 0

    def _make(self, rule: AnyOptimizer) -> ExternalLookups:
        features = [FeatureConfig(name=name, table=self.config.name, combiner=name) for name in _FEATURES]
        together, name = group(), self.config.name
        num_rows = getattr(self.config, "num_rows", together.size)
        ranks = range(min(together.size, num_rows)) if self.process is None else [self.process]
        entry = {"table": name, "kind": "row" if self.process is None else "table", "ranks": list(ranks)}
        plan: Any = "auto" if together.size == 1 else {"world_size": together.size, "tables": [entry]}
        collections = make_tables(
            [self.config], features, rule.model_copy(update={"lr": None}), seed=self.seed, group=together, plan=plan
        )
        return ExternalLookups(collections, f"variable {self.config.name!r}", most_waiting=_MOST_LOOKUPS)

    def set_rule(self, rule: AnyOptimizer) -> None:
        """Set the optimizer; the state of another one is discarded."""
        with self._lock:
            if rule == self.rule:
                return
            before, name = self.collection, self.config.name
            self._early |= {number: batch for number, (_, batch) in self._numbers.items()}
            self._numbers.clear()
            self.lookups = self._make(rule)
            if self.is_dynamic:
                own, new = _dynamic(before, name), self.dynamic
                if own is not None and new is not None:
                    content = own.export()
                    new.import_(type(content)(content.keys, content.weight, content.scores, content.clocks))
            else:
                self.collection.import_table(name, TableState(before.export_table(name).weight))
            self.rule = rule

    def _batch(self, values: Tensor, offsets: Tensor, weights: Tensor | None, combiner: str) -> dict[str, Bag]:
        nothing = Bag(values[:0], torch.zeros_like(offsets))
        return {name: Bag(values, offsets, weights) if name == combiner else nothing for name in _FEATURES}

    def _mine(self, flat: Tensor, combiner: str) -> Tensor:
        start = list(_FEATURES).index(combiner) * self.config.dim
        return flat[:, start : start + self.config.dim]

    def read(self, values: Tensor, offsets: Tensor, weights: Tensor | None, combiner: str, add: bool = False) -> Tensor:
        """Pool rows without training: (B, D).

        Args:
            values, offsets, weights, combiner: the bags.
            add: keys that a dynamic table does not know are added, as SOK's lookups do.
        """
        with self._lock:
            return self._mine(self._read(self._batch(values, offsets, weights, combiner), add), combiner)

    def _read(self, batch: dict[str, Bag], add: bool) -> Tensor:
        """Pool rows of the whole batch; keys are not added beside lookups that wait, or where admission counts them."""
        if (
            not add
            or not self.is_dynamic
            or self.lookups.num_waiting
            or self._ended
            or getattr(self.config, "admission", None)
        ):
            return self.lookups.read(batch)
        _, flat = self.lookups.begin(batch)
        self.lookups.discard()
        return flat

    def begin(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, combiner: str, certain: bool = True
    ) -> tuple[int, Tensor]:
        """Pool rows in training: the lookup's number, and the vectors (B, D).

        Args:
            values, offsets, weights, combiner: the bags.
            certain: a gradient is expected; without it the keys alone are kept for a while.
        """
        with self._lock:
            # The keys are another framework's memory, which is gone when the optimizer comes.
            batch = self._batch(values.clone(), offsets.clone(), None if weights is None else weights.clone(), combiner)
            number, self._next = self._next, self._next + 1
            self._check_applied()
            if not self._ended:
                self._seen.clear()
            if self.rule is None or not certain:
                self._early[number] = batch
                if len(self._early) > _MOST_LOOKUPS:
                    self._early.pop(next(iter(self._early)))
                return number, self._mine(self._read(batch, add=not certain), combiner)
            own, flat = self.lookups.begin(batch)
            self._numbers[number] = own, batch
            self._mark()
            return number, self._mine(flat, combiner)

    def deliver(self, number: int, gradient: Tensor, combiner: str) -> bool:
        """Bring the gradient (B, D) of a lookup; whether it is the first since the last step.

        Raises:
            LostUpdateError: the lookup does not wait for one, or gradients come and no step is made.
        """
        with self._lock:
            wide = gradient.new_zeros(len(gradient), len(_FEATURES) * self.config.dim)
            self._mine(wide, combiner).copy_(gradient)
            before = self._seen.get(number)
            if before is not None and torch.equal(before, wide):
                return False  # a persistent tape, asked again for other variables, comes by here again
            self._check_waits(number)
            first = not self._ended
            self._seen[number] = wide
            self._ended[number] = self._ended[number] + wide if number in self._ended else wide
            return first

    def _check_waits(self, number: int) -> None:
        where = f"variable {self.config.name!r}"
        if number not in self._early and number not in self._numbers:
            raise LostUpdateError(
                "a gradient came for a lookup that does not wait for one", where=where, value=number,
                fix="apply the gradients of a step after all of them were computed",
            )  # fmt: skip

    def _check_applied(self) -> None:
        """Raise where gradients of many lookups came and no step was made."""
        if self._ended and max(len(self._early), len(self._numbers)) >= _MOST_LOOKUPS:
            count = len(self._ended)
            self._ended.clear()
            self._early.clear()
            self._numbers.clear()
            self.lookups.discard()
            raise LostUpdateError(
                "gradients of rows came and were not applied", where=f"variable {self.config.name!r}", value=count,
                fix="pass the variable to apply_gradients of a sok.OptimizerWrapper, or within sok.OptimizerScope",
            )  # fmt: skip

    def step(self, rule: AnyOptimizer, lr: float, scale: float) -> None:
        """Update the rows by all gradients that have come."""
        with self._lock:
            self.set_rule(rule)
            ended, self._ended = self._ended, {}
            for number in ended:
                if number in self._early:  # now with the optimizer's rows and state
                    batch = self._early.pop(number)
                    self._numbers[number] = self.lookups.begin(batch)[0], batch
                    self._mark()
            for number, gradient in ended.items():
                self.lookups.end(self._numbers.pop(number)[0], gradient, lr, scale)
            self._early.clear()
            if self._numbers:  # lookups of this step that the loss does not contain
                self._numbers.clear()
                self.lookups.discard()

    # Rows ---------------------------------------------------------------------------------------------------

    @property
    def is_dynamic(self) -> bool:
        """Whether the table grows with its keys."""
        return isinstance(self.config, DynamicTableConfig)

    @property
    def num_pending(self) -> int:
        """Gradients that have come and were not applied."""
        return len(self._ended)

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer so far."""
        if self.is_dynamic:
            return 0 if self.dynamic is None else self.dynamic.num_steps
        return self.collection.export_table(self.config.name, copy=False).step

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return keys (N,), rising, and rows (N, D); of a dynamic table that another process has none."""
        if self.is_dynamic:
            content = self._content()
            if content is None:
                return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.config.dim)
            order = torch.argsort(content.keys)
            return content.keys[order], content.weight[order].float()
        rows = self.collection.export_table(self.config.name).weight.float()
        return torch.arange(len(rows)), rows

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state by name, in the order of `rows`."""
        if self.is_dynamic:
            content = self._content()
            if content is None:
                return {}
            order = torch.argsort(content.keys)
            return {name: part[order].float() for name, part in content.state.items()}
        return {name: part.float() for name, part in self.collection.export_table(self.config.name).state.items()}

    def _content(self) -> DynamicContent | None:
        return None if self.dynamic is None else self.dynamic.export()

    def put(self, keys: Tensor, rows: Tensor) -> None:
        """Put rows (N, D) under keys (N,); keys that a dynamic table does not know are added.

        Over several processes all call it together, each with keys of its own.

        Raises:
            ConfigError: shapes differ, or a key is not in a fixed table.
        """
        self._put(*self._of_all(keys, rows))

    def add(self, keys: Tensor, rows: Tensor) -> None:
        """Add rows (N, D) to those of keys (N,), which may come more than once; see `put`."""
        keys, rows = self._of_all(keys, rows)
        own, place = torch.unique(keys, return_inverse=True)
        before = self.read(own, torch.arange(len(own) + 1), None, "sum").float()
        self._put(own, before.index_add(0, place, rows))

    def _of_all(self, keys: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and rows that all processes gave."""
        name, dim = self.config.name, self.config.dim
        if tuple(rows.shape) != (len(keys), dim):
            raise ConfigError(
                "rows do not fit", value=tuple(rows.shape), where=f"variable {name!r}", allowed=str((len(keys), dim))
            )
        return gathered(keys, rows)

    def _put(self, keys: Tensor, rows: Tensor) -> None:
        if isinstance(self.config, DynamicTableConfig):
            table = self.dynamic
            if table is not None:
                found = table.find_or_insert(keys)
                table.weight[found] = rows.to(table.weight)
            return
        name, count = self.config.name, self.config.num_rows
        if len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < count:
            raise ConfigError("no such key", where=f"variable {name!r}", value=[int(keys.min()), int(keys.max())],
                              allowed=f"0 to {count - 1}")  # fmt: skip
        whole = self.collection.export_table(name).weight
        whole[keys] = rows.to(whole)
        self.collection.copy_rows(name, whole)

    # When keys were used ------------------------------------------------------------------------------------

    def _mark(self) -> None:
        table = self.dynamic if self.is_dynamic else None
        if table is not None:
            now = time.time()
            if not self._times or now - self._times[-1][0] > 0.001:
                self._times.append((now, table.clock))
            else:
                self._times[-1] = (self._times[-1][0], table.clock)
            if len(self._times) > 1 << 16:  # a coarser log of the past
                self._times = [*self._times[: 1 << 15 : 2], *self._times[1 << 15 :]]

    def rows_since(self, moment: float) -> tuple[Tensor, Tensor]:
        """Return the keys (N,) that training used after a time, in seconds since 1970, and their rows (N, D)."""
        at = bisect_right(self._times, (moment, 2**63))
        table = self.dynamic
        if table is None:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.config.dim)
        content = table.export(since=0 if at == 0 else self._times[at - 1][1])
        return content.keys, content.weight.float()
