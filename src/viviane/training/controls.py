"""The numbers of a step that the host decides, on the device: rates, and what dense optimizers compute with."""

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
    """Return what `viviane.ops.dense_update` reads of a group's present step.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.optim import build_dense_optimizer
        >>> all_numbers(build_dense_optimizer(SGD(momentum=0.75), [torch.ones(1)], 0.5), 0)
        [0.5, 0.0, 0.0, 0.75, 0.0, 0.25, 1.0, 0.0, 0.0]
    """
    return optimizer.numbers(optimizer.param_groups[place]).values()


def step_values(lr: float, factor: float, optimizer: DenseOptimizer | None, means: Sequence[float] = ()) -> list[float]:
    """Return the numbers of a step, as `Controls` holds them.

    Args:
        lr: the learning rate.
        factor: the schedule's factor.
        optimizer: whose groups count this step already.
        means: numbers of a running mean.
    """
    values = [lr, factor]
    if optimizer is not None:
        for place in range(len(optimizer.param_groups)):
            values += all_numbers(optimizer, place)
    return [*values, *means]


class Controls:
    """A vector on the device, float64: learning rate, its factor, numbers of each parameter group, and of the mean.

    The host writes them to the `HostControlBlock` while the previous step's update still reads its own values; `take`
    copies them to where the step reads them. If steps may be skipped before the host knows it, the host writes one row
    for each possible number of skipped steps, and the device selects the right one.

    Args:
        device: of the parameters.
        num_groups: parameter groups of the dense optimizer.
        num_means: numbers of a running mean of weights.
        num_rows: how many rows are told; 1: nothing is to be chosen.

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
        """Return the numbers of a group, (NUM_DENSE_NUMBERS,)."""
        start = _RATES + place * NUM_DENSE_NUMBERS
        return self._vector[start : start + NUM_DENSE_NUMBERS]

    @property
    def means(self) -> Tensor:
        """The numbers of a running mean, (num_means,)."""
        return self._vector[self._means :]

    def pack(self, rows: Sequence[Sequence[float]], num_skipped: int = 0) -> list[float]:
        """Return what the host tells of the next step, (width,).

        Args:
            rows: see `step_values`; row i is for i skipped steps that the host does not know of yet.
            num_skipped: how many those are that it knows of.
        """
        if self.num_rows == 1:
            return list(rows[0])
        return [number for i in range(self.num_rows) for number in rows[min(i, len(rows) - 1)]] + [float(num_skipped)]

    def take(self, values: Tensor, num_skipped: Tensor | None = None) -> None:
        """Take what was told, on the device; to be recorded before anything that reads the numbers.

        Args:
            values: (width,), float64, on the device.
            num_skipped: how many steps were skipped, 0-dim, float64; None where nothing is to be chosen.
        """
        if num_skipped is None:
            self._vector.copy_(values)
            return
        row = (num_skipped - values[-1]).to(torch.int64).view(1)
        self._vector.copy_(values[:-1].view(self.num_rows, -1).index_select(0, row)[0])


class DeviceMover:
    """Moves all dense parameters of a group in one launch.

    Outside of a capture the numbers of the step are sent along; a recorded launch reads those of `controls`.

    Args:
        controls: of recorded steps; set before a capture.
        gate: of recorded steps.
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
        """Move the tensors."""
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
        """Reserve what recorded launches will read, before a capture; to be kept as long as the graph."""
        groups = enumerate(optimizer.param_groups)
        return [self._workspaces.setdefault(i, Workspace()).reserve(group["params"]) for i, group in groups]

    def write(self) -> list[Tensor]:
        """Write what recorded launches will read, after a capture; returns what else they read, to be kept, too.

        Steps from Python make that, and put other tensors in its place once other parameters have gradients.
        """
        for workspace in self._workspaces.values():
            workspace.write()
        return [one for workspace in self._workspaces.values() for one in workspace.tensors.values()]
