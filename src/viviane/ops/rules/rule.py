"""The contract of an optimizer rule: its state, and its arithmetic in every implementation.

A rule is a class beside this file, and all of an optimizer is in one file: plain torch, Numba and Triton for rows of
tables, plain torch and Triton for dense parameters (on the CPU dense parameters use the Numba function of the rows).

Shapes: U rows of D numbers. `wide` state has D numbers for each row, `per_row` state one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

# Numbers that a CPU kernel reads, float64: what all rules share, then the rule's own.
SCALE: Final = 0
CLIP: Final = 1
DECAY: Final = 2
LR: Final = 3
OWN: Final = 4

MAX_ROW_NUMBERS: Final = 10
"""Numbers of a rule that a GPU kernel can read from memory."""


class DenseNumbers(NamedTuple):
    """What the arithmetic of dense parameters reads in one step.

    `rate` is the factor of the update, `decay` the coupled weight decay; the others are the rule's own.
    """

    rate: float
    decay: float = 0.0
    epsilon: float = 0.0
    first: float = 0.0
    second: float = 0.0
    third: float = 0.0
    fourth: float = 0.0

    def values(self) -> list[float]:
        """Return the vector that kernels read: the fields up to `second`, 1 - first, 1 - second, third, fourth.

        Example:
            >>> DenseNumbers(0.1, first=0.75).values()
            [0.1, 0.0, 0.0, 0.75, 0.0, 0.25, 1.0, 0.0, 0.0]
        """
        return [*self[:5], 1 - self.first, 1 - self.second, self.third, self.fourth]

    @classmethod
    def of(cls, values: Sequence[Any]) -> DenseNumbers:
        """Return the numbers of a vector, or of its 0-dim tensors on a device.

        Example:
            >>> DenseNumbers.of(DenseNumbers(0.1, third=2.0).values())
            DenseNumbers(rate=0.1, decay=0.0, epsilon=0.0, first=0.0, second=0.0, third=2.0, fourth=0.0)
        """
        return cls(*values[:5], *values[7:])


NUM_DENSE_NUMBERS: Final = 9


class Rule(ABC):
    """One variant of an optimizer with its settings.

    Args:
        settings: of `viviane.config.optimizers`.

    Attributes:
        name: of the variant; kernels are compiled once for each.
        states: names of the state, wide ones first; checkpoints and kernels use this order.
        per_row: those with one number for each row.
        uses_step: whether the arithmetic depends on the number of the step.
        sums_rows: whether it reduces over the numbers of a row.
        rests: whether a gradient of zero leaves weight and state as they are, bit by bit, without weight decay.
        divides_by_rate: whether the arithmetic divides by the learning rate, which then cannot be 0.
        couples_decay: whether weight decay is added to the gradient; otherwise the rule applies it itself.
        cpu: Numba: (w, g, s, t, own, row, numbers, dim), see `viviane.ops.rules.numba_rules`.
        gpu: Triton: (w, g, first, second, own, numbers, inside, dim) -> (w, first, second, own).
        gpu_step_numbers: Triton: (numbers, lr, step, exact), writes what depends on the learning rate or the step.
    """

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    per_row: ClassVar[frozenset[str]] = frozenset()
    uses_step: ClassVar[bool] = False
    sums_rows: ClassVar[bool] = False
    rests: ClassVar[bool] = False
    divides_by_rate: ClassVar[bool] = False
    couples_decay: ClassVar[bool] = True
    cpu: ClassVar[Any]
    gpu: ClassVar[Any]
    gpu_step_numbers: ClassVar[Any]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @property
    def epsilon_inside(self) -> bool:
        """Whether the denominator is sqrt(s + epsilon) and not sqrt(s) + epsilon."""
        return bool(getattr(self.settings, "epsilon_inside_root", False))

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the columns of a row cannot be updated separately: the rule, or its clipping, reduces over them."""
        return self.sums_rows or self.settings.clip_row_norm is not None

    @property
    def decay(self) -> float:
        """The weight decay that is added to the gradient."""
        return float(self.settings.weight_decay) if self.couples_decay else 0.0

    @property
    def exact(self) -> tuple[float, float, float]:
        """Settings that `gpu_step_numbers` computes with in float64."""
        return 0.0, 0.0, 0.0

    def initial(self) -> dict[str, float]:
        """Return the value that each state begins with."""
        return dict.fromkeys(self.states, 0.0)

    # Rows of tables ------------------------------------------------------------------------------------------

    @abstractmethod
    def update(self, w: Tensor, g: Tensor, state: MutableMapping[str, Tensor], lr: float, step: int) -> Tensor:
        """Return the new rows (U, D) in plain torch, and replace their state: (U, D) or (U,) each."""

    @abstractmethod
    def cpu_numbers(self, lr: float, step: int) -> list[float]:
        """Return the rule's own numbers for `cpu`, from OWN on."""

    def cpu_step_numbers(self, lr: float, step: int, scale: float) -> list[float]:
        """Return all numbers for `cpu`: scale, clip (0: none), coupled weight decay, lr, and then the rule's own."""
        return [scale, self.settings.clip_row_norm or 0.0, self.decay, lr, *self.cpu_numbers(lr, step)]

    @abstractmethod
    def gpu_numbers(self, lr: float, step: int) -> tuple[float, ...]:
        """Return the numbers for `gpu`, at most MAX_ROW_NUMBERS."""


class DenseRule(Rule):
    """A rule that trains dense parameters as well as rows.

    Attributes:
        gpu_dense: Triton: (w, g, first, second, numbers, inside) -> (w, first, second), with `numbers` a pointer to
            `DenseNumbers.values`; None where the rule needs a reduction over a whole tensor.
    """

    gpu_dense: ClassVar[Any] = None

    @abstractmethod
    def dense_numbers(self, group: Mapping[str, Any]) -> DenseNumbers:
        """Return the numbers of a parameter group's present step, whose number is group["step"]."""

    @classmethod
    @abstractmethod
    def cpu_dense_numbers(cls, numbers: Sequence[float], inside: bool) -> list[float]:
        """Return what `cpu` reads for dense parameters, from LR on, of the vector of `DenseNumbers.values`."""

    @classmethod
    @abstractmethod
    def update_dense(
        cls,
        params: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[list[Tensor]],
        numbers: DenseNumbers,
        inside: bool,
    ) -> None:
        """Move parameters and state in place, in plain torch; gradients have scale and coupled decay applied."""


def root(s: Tensor, settings: Any) -> Tensor:
    """Return sqrt(s) + epsilon, or sqrt(s + epsilon)."""
    epsilon: float = settings.epsilon
    return (s + epsilon).sqrt() if settings.epsilon_inside_root else s.sqrt() + epsilon


def root_numbers(settings: Any) -> list[float]:
    """Return (a, b) of the root sqrt(s + a) + b that CPU kernels compute."""
    return [settings.epsilon, 0.0] if settings.epsilon_inside_root else [0.0, settings.epsilon]


def dense_roots(squares: Sequence[Tensor], epsilon: float, inside: bool) -> list[Tensor]:
    """Return the roots of several tensors."""
    if inside:
        return list(torch._foreach_sqrt(torch._foreach_add(list(squares), epsilon)))
    roots = list(torch._foreach_sqrt(list(squares)))
    torch._foreach_add_(roots, epsilon)
    return roots
