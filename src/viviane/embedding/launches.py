"""Which tables of a storage one launch of an update moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from viviane.config.optimizers import AnyOptimizer
from viviane.embedding.step_counters import StepCounters
from viviane.ops.rules import rule_of


@dataclass(frozen=True)
class RuleRange:
    """Adjacent tables of a storage with one optimizer: rows start to stop."""

    start: int
    stop: int
    optimizer: AnyOptimizer | None
    tables: tuple[str, ...]

    @cached_property
    def uses_step(self) -> bool:
        """Whether the optimizer's arithmetic depends on the number of the step."""
        return self.optimizer is not None and rule_of(self.optimizer).uses_step


class Launch(NamedTuple):
    """What one launch moves: neighbouring tables of one rule, and views of their rows and state."""

    start: int
    stop: int
    tables: tuple[str, ...]
    rule: AnyOptimizer
    by_count: bool
    """Whether the update depends on the number of steps, by bias corrections or stochastic rounding."""
    weight: Tensor
    state: dict[str, Tensor]


class Launches:
    """The launches of a storage's steps, kept from step to step.

    Args:
        rule_ranges: of the storage.
        first_rows: of its tables.
        room: rows of memory of its tables.
        steps: its counters.
        rounds: whether rows are rounded stochastically, by the number of the step.
    """

    def __init__(
        self,
        rule_ranges: Sequence[RuleRange],
        first_rows: Mapping[str, int],
        room: Mapping[str, int],
        steps: StepCounters,
        rounds: bool,
    ) -> None:
        self._rule_ranges, self._first_rows, self._room = rule_ranges, first_rows, room
        self._steps, self._rounds = steps, rounds
        self._kept: tuple[int, frozenset[str], Tensor, list[Launch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # views, of which pickle would make tables of their own

    def forget(self) -> None:
        """Forget the views of rows and state, which have moved."""
        self._kept = None

    def of(
        self, active: frozenset[str], weight: Tensor, state_of: Callable[[int, int, int], dict[str, Tensor]]
    ) -> list[Launch]:
        """Return the launches of a step; the same list as long as nothing has changed.

        Args:
            active: tables whose step has just been counted.
            weight: all rows of the storage.
            state_of: returns views of the optimizer state of a rule range, from row to row.
        """
        version, kept = self._steps.version, self._kept
        if kept is not None and kept[:2] == (version, active) and kept[2] is weight:
            return kept[3]
        found = []
        for index, rule_range in enumerate(self._rule_ranges):
            by_count = self._rounds or rule_range.uses_step
            for run in self._runs(rule_range, active, self._steps.shared_counts if by_count else None):
                start, stop = self._first_rows[run[0]], self._first_rows[run[-1]] + self._room[run[-1]]
                assert rule_range.optimizer is not None
                state = state_of(index, start, stop)
                found.append(Launch(start, stop, run, rule_range.optimizer, by_count, weight[start:stop], state))
        self._kept = version, active, weight, found
        return found

    @staticmethod
    def _runs(rule_range: RuleRange, active: frozenset[str], counts: Mapping[str, int] | None) -> list[tuple[str, ...]]:
        runs: list[list[str]] = []
        for before, name in zip((None, *rule_range.tables), rule_range.tables, strict=False):
            together = runs and before == runs[-1][-1] and (counts is None or counts[before] == counts[name])
            if name in active and together:
                runs[-1].append(name)
            elif name in active:
                runs.append([name])
        return [tuple(run) for run in runs]
