"""Dense parameters in a step: where their gradients are, and the fused update of all tensors of a parameter group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from viviane.ops.capture import is_capturing
from viviane.ops.dense_update import Workspace, move_tensors
from viviane.optim import DenseOptimizer


class DenseGradients:
    """Gradients of dense parameters: in `grad`, or in `wire_gradients` if their type differs, which torch refuses.

    Args:
        parameters: parameters by name.

    Attributes:
        wire_gradients: gradients whose type differs from their parameter's, instead of its `grad`.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> gradients = DenseGradients(dict(layer.named_parameters()))
        >>> gradients.wire_gradients[layer.weight] = layer.weight.detach().bfloat16()
        >>> gradients.named()["weight"].dtype
        torch.bfloat16
        >>> gradients.drop(); gradients.named()
        {}
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.wire_gradients: dict[Tensor, Tensor] = {}

    def named(self) -> dict[str, Tensor]:
        """Return the existing gradients, by parameter name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient = self.wire_gradients.get(parameter, parameter.grad)
            if gradient is not None:
                found[name] = gradient
        return found

    def all(self) -> list[Tensor]:
        """Return the existing gradients."""
        return list(self.named().values())

    def drop(self) -> None:
        """Drop all gradients."""
        self.wire_gradients.clear()
        for parameter in self.parameters.values():
            parameter.grad = None


def all_numbers(optimizer: DenseOptimizer, place: int) -> list[float]:
    """Return the values that `viviane.ops.dense_update` reads in the current step of a parameter group.

    Example:
        >>> from viviane.config import SGD
        >>> from viviane.optim import build_dense_optimizer
        >>> all_numbers(build_dense_optimizer(SGD(momentum=0.75), [torch.ones(1)], 0.5), 0)
        [0.5, 0.0, 0.0, 0.75, 0.0, 0.25, 1.0, 0.0, 0.0]
    """
    return optimizer.numbers(optimizer.param_groups[place]).values()


class DenseMover:
    """Updates all dense parameters of a group in one launch.

    An eager launch copies the values of the step to the device; a captured launch reads the tensors of
    `device_numbers`.

    Attributes:
        device_numbers: returns the values of a parameter group on the device; set before a capture.
        gate: gate of captured steps.
    """

    def __init__(self) -> None:
        self.device_numbers: Callable[[int], Tensor] | None = None
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
        if self.device_numbers is not None and is_capturing(device):
            numbers, gate = self.device_numbers(place), self.gate
        else:
            host = torch.tensor(optimizer.numbers(group).values(), dtype=torch.float64)
            numbers = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
        move_tensors(
            optimizer.rule.name, params, gradients, states, numbers, inside=bool(group.get("epsilon_inside_root")),
            decays=optimizer.decays(group), scale=factor, gate=gate,
            workspace=self._workspaces.get(place) or self._workspaces.setdefault(place, Workspace()),
        )  # fmt: skip

    def reserve(self, optimizer: DenseOptimizer) -> list[Tensor]:
        """Reserve the memory that captured launches read, before a capture; keep it as long as the graph."""
        groups = enumerate(optimizer.param_groups)
        return [self._workspaces.setdefault(i, Workspace()).reserve(group["params"]) for i, group in groups]

    def write(self) -> list[Tensor]:
        """Write the memory that captured launches read, after a capture; return more tensors to keep with the graph.

        Eager steps create these tensors, and replace them when other parameters have gradients.
        """
        for workspace in self._workspaces.values():
            workspace.write()
        return [one for workspace in self._workspaces.values() for one in workspace.tensors.values()]
