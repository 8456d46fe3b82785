"""Where the gradients of dense parameters are between backward and the update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


class DenseGradients:
    """Gradients of dense parameters: in `grad`, or beside it where they have another type, which torch does not take.

    Args:
        parameters: by name.

    Attributes:
        beside: gradients of another type than their parameter's, in place of its `grad`.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> gradients = DenseGradients(dict(layer.named_parameters()))
        >>> gradients.beside[layer.weight] = layer.weight.detach().bfloat16()
        >>> gradients.named()["weight"].dtype
        torch.bfloat16
        >>> gradients.drop(); gradients.named()
        {}
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.beside: dict[Tensor, Tensor] = {}

    def named(self) -> dict[str, Tensor]:
        """Return the gradients that are there, by their parameter's name."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient = self.beside.get(parameter, parameter.grad)
            if gradient is not None:
                found[name] = gradient
        return found

    def all(self) -> list[Tensor]:
        """Return the gradients that are there."""
        return list(self.named().values())

    def drop(self) -> None:
        """Let all gradients go."""
        self.beside.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
