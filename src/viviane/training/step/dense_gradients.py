"""The gradients of dense parameters between backward and the update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


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
