"""Initial values, drawn so that a weight depends on the seed and its own name alone."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal, TypeAlias

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from viviane.core.errors import ConfigError
from viviane.core.machine import free_memory
from viviane.core.seeds import derive_seed

HUGECTR_NAMES: Final = {
    "Default": "default",
    "Uniform": "uniform",
    "XavierNorm": "xavier_normal",
    "XavierUniform": "xavier_uniform",
    "Zero": "zero",
}
"""The members of HugeCTR's Initializer_t, which every layer takes besides our own names."""

_LARGE: Final = 1 << 26
"""Bytes of a weight from which it is compared with the free memory, which takes the system some 100 us to tell."""


def _our_name(value: Any) -> Any:
    return HUGECTR_NAMES.get(value, value) if isinstance(value, str) else value


InitializerName: TypeAlias = Annotated[
    Literal["default", "uniform", "xavier_normal", "xavier_uniform", "zero"], BeforeValidator(_our_name)
]


class Initializer:
    """Draws the weights of one layer; adding or reordering other layers does not change them.

    Args:
        seed: the run's seed.
        layer: the layer's name.
        most_bytes: of one weight; None: no limit.

    Raises:
        ConfigError: a weight would be larger, or larger than half of the free memory.

    Example:
        >>> a = Initializer(1, "mlp").uniform("weight", (2, 3), 0.5)
        >>> bool((a == Initializer(1, "mlp").uniform("weight", (2, 3), 0.5)).all())
        True
    """

    def __init__(self, seed: int, layer: str, most_bytes: int | None = None) -> None:
        self.seed = seed
        self.layer = layer
        self.most_bytes = most_bytes

    def check_size(self, parameter: str, numbers: int) -> None:
        """Refuse a weight or buffer of so many numbers if it is larger than `most_bytes` or half of the free memory."""
        size = numbers * torch.get_default_dtype().itemsize
        if self.most_bytes is not None and size > self.most_bytes:
            raise ConfigError(
                "a weight is larger than the file of all weights", where=f"layer {self.layer!r}, {parameter}",
                value=f"{size} bytes", allowed=f"at most {self.most_bytes} bytes",
                fix="use another copy of the model",
            )  # fmt: skip
        if size > _LARGE and (free := free_memory()) is not None and 2 * size > free:
            # Systems that hand out more memory than they have would end the process when it is filled.
            raise ConfigError(
                "a weight does not fit into memory", where=f"layer {self.layer!r}, {parameter}",
                value=f"{size} bytes", fix="make the layer narrower",
                allowed=f"at most {free // 2} bytes: {free} are free, and a gradient takes as many",
            )  # fmt: skip

    def _empty(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        self.check_size(parameter, math.prod(shape))
        return torch.empty(shape)

    def _generator(self, parameter: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(self.seed, "init", self.layer, parameter))

    def uniform(self, parameter: str, shape: tuple[int, ...], bound: float) -> nn.Parameter:
        """Draw from U(-bound, bound)."""
        values = self._empty(parameter, shape).uniform_(-bound, bound, generator=self._generator(parameter))
        return nn.Parameter(values)

    def normal(self, parameter: str, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """Draw from N(0, std^2)."""
        return nn.Parameter(self._empty(parameter, shape).normal_(0.0, std, generator=self._generator(parameter)))

    def truncated_normal(self, parameter: str, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """Draw from N(0, std^2), cut at two standard deviations."""
        values = self._empty(parameter, shape)
        nn.init.trunc_normal_(values, 0.0, std, -2 * std, 2 * std, generator=self._generator(parameter))
        return nn.Parameter(values)

    def constant(self, shape: tuple[int, ...], value: float = 0.0) -> nn.Parameter:
        """Return a constant weight."""
        return nn.Parameter(self._empty("a constant", shape).fill_(value))

    def weight(
        self, parameter: str, shape: tuple[int, ...], kind: InitializerName, *, fan_in: int, fan_out: int
    ) -> nn.Parameter:
        """Draw a matrix by the named rule; "default" is Xavier-normal.

        uniform         U(-1/(fan_in + fan_out), 1/(fan_in + fan_out))
        xavier_normal   N(0, 2 / (fan_in + fan_out))
        xavier_uniform  U(-a, a), a = sqrt(6 / (fan_in + fan_out))

        The fan_in of a bias is 0, as in HugeCTR.
        """
        total = fan_in + fan_out
        if kind == "zero":
            return self.constant(shape)
        if kind == "uniform":
            return self.uniform(parameter, shape, 1 / total)
        if kind == "xavier_uniform":
            return self.uniform(parameter, shape, math.sqrt(6 / total))
        return self.normal(parameter, shape, math.sqrt(2 / total))
