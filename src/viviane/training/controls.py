"""The values of a step that the host decides, on the device: learning rates and hyper-parameters of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.capture import is_capturing
from viviane.ops.dense_update import Workspace, move_tensors
from viviane.ops.rules import NUM_DENSE_NUMBERS
from viviane.optim import DenseOptimizer

_RATES = 2


def all_numbers(optimizer: DenseOptimizer, place: int) -> list[float]:
    """Return the values that `viviane.ops.dense_update` reads in the current step of a parameter group.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.optim import build_dense_optimizer
        >>> all_numbers(build_dense_optimizer(SGD(momentum=0.75), [torch.ones(1)], 0.5), 0)
        [0.5, 0.0, 0.0, 0.75, 0.0, 0.25, 1.0, 0.0, 0.0]
    """
    return optimizer.numbers(optimizer.param_groups[place]).values()


def step_values(lr: float, factor: float, optimizer: DenseOptimizer | None, means: Sequence[float] = ()) -> list[float]:
    """Return the values of a step in the order of `Controls`.

    Args:
        lr: the learning rate.
        factor: the schedule's factor.
        optimizer: its groups have counted this step already.
        means: values of a running mean of weights.
    """
    values = [lr, factor]
    if optimizer is not None:
        for place in range(len(optimizer.param_groups)):
            values += all_numbers(optimizer, place)
    return [*values, *means]


class Controls:
    """A float64 vector on the device: learning rate, its factor, values of each parameter group, and of the mean.

    The host writes them to the `HostControlBlock` while the previous step's update still reads its own values; `take`
    copies them to where the step reads them. If steps may be skipped before the host knows it, the host writes one row
    for each possible number of skipped steps, and the device selects the right one.

    Args:
        device: of the parameters.
        num_groups: parameter groups of the dense optimizer.
        num_means: values of a running mean of weights.
        num_rows: number of rows the host writes; 1: there is nothing to select.

    Attributes:
        width: length of the packed vector.
    """

    def __init__(self, device: torch.device, num_groups: int, num_means: int = 0, num_rows: int = 1) -> None:
        size = _RATES + num_groups * NUM_DENSE_NUMBERS + num_means
        self._means = size - num_means
        self.num_rows = num_rows
        self._vector = torch.zeros(size, dtype=torch.float64, device=device)
        self.width = size if num_rows == 1 else num_rows * size + 1

    @property
    def lr(self) -> Tensor:
        """The learning rate, 0-dim."""
        return self._vector[0]

    @property
    def factor(self) -> Tensor:
        """The schedule's factor, 0-dim."""
        return self._vector[1]

    def group(self, place: int) -> Tensor:
        """Return the values of a parameter group, (NUM_DENSE_NUMBERS,)."""
        start = _RATES + place * NUM_DENSE_NUMBERS
        return self._vector[start : start + NUM_DENSE_NUMBERS]

    @property
    def means(self) -> Tensor:
        """The values of a running mean, (num_means,)."""
        return self._vector[self._means :]

    def pack(self, rows: Sequence[Sequence[float]], num_skipped: int = 0) -> list[float]:
        """Return the vector that the host writes for the next step, (width,).

        Args:
            rows: see `step_values`; row i applies if i steps in flight are skipped.
            num_skipped: skipped steps that the host knows of.
        """
        if self.num_rows == 1:
            return list(rows[0])
        return [number for i in range(self.num_rows) for number in rows[min(i, len(rows) - 1)]] + [float(num_skipped)]

    def take(self, values: Tensor, num_skipped: Tensor | None = None) -> None:
        """Load a packed vector on the device; captured before anything that reads the values.

        Args:
            values: (width,), float64, on the device.
            num_skipped: number of skipped steps, 0-dim, float64; None if there is only one row.
        """
        if num_skipped is None:
            self._vector.copy_(values)
            return
        row = (num_skipped - values[-1]).to(torch.int64).view(1)
        self._vector.copy_(values[:-1].view(self.num_rows, -1).index_select(0, row)[0])


class DeviceMover:
    """Updates all dense parameters of a group in one launch.

    An eager launch copies the values of the step to the device; a captured launch reads those of `controls`.

    Args:
        controls: of captured steps; set before a capture.
        gate: of captured steps.
    """

    def __init__(self) -> None:
        self.controls: Controls | None = None
        self.gate: Tensor | None = None
        self._workspaces: dict[int, Workspace] = {}

    def __call__(
        self,
        optimizer: DenseOptimizer,
        place: int,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[list[Tensor]],
        scale: float | Tensor,
    ) -> None:
        """Update the tensors."""
        device, group = params[0].device, optimizer.param_groups[place]
        gate, factor = None, scale if isinstance(scale, Tensor) else None
        if not isinstance(scale, Tensor) and scale != 1.0:
            factor = torch.full((), scale, dtype=torch.float32, device=device)
        if self.controls is not None and is_capturing(device):
            numbers, gate = self.controls.group(place), self.gate
        else:
            host = torch.tensor(all_numbers(optimizer, place), dtype=torch.float64)
            numbers = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        move_tensors(
            optimizer.rule.name, params, gradients, states, numbers, inside=bool(group.get("epsilon_inside_root")),
            decays=optimizer.decays(group), scale=factor, gate=gate,
            workspace=self._workspaces.setdefault(place, Workspace()),
        )  # fmt: skip

    def reserve(self, optimizer: DenseOptimizer) -> list[Tensor]:
        """Reserve the memory that captured launches read, before a capture; keep it as long as the graph."""
        groups = enumerate(optimizer.param_groups)
        return [self._workspaces.setdefault(i, Workspace()).reserve(group["params"]) for i, group in groups]

    def write(self) -> list[Tensor]:
        """Write what captured launches read, after a capture; return further tensors to keep as long as the graph.

        Eager steps create these tensors, and replace them when other parameters have gradients.
        """
        for workspace in self._workspaces.values():
            workspace.write()
        return [one for workspace in self._workspaces.values() for one in workspace.tensors.values()]
