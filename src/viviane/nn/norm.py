"""Normalisation layers."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape


class BatchNormParameters(Settings):
    """Parameters of `BatchNorm`.

    Args:
        factor: weight of the newest batch in the running statistics; 1.0, HugeCTR's default, keeps the last
            batch's alone, so most users want 0.1.
        eps: added to the variance.
    """

    factor: float = Field(default=1.0, gt=0, le=1)
    eps: float = Field(default=1e-5, gt=0)


@LAYERS.register("BatchNorm")
class BatchNorm(Layer):
    """Normalise each feature over the batch: y = gamma (x - mean) / sqrt(var + eps) + beta, (B, n) -> (B, n).

    In evaluation the running statistics are used: running = factor batch + (1 - factor) running.

    Source: Ioffe and Szegedy 2015.
    """

    Parameters = BatchNormParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create gamma = 1, beta = 0 and the running statistics."""
        settings = cast(BatchNormParameters, self.settings)
        (n,) = self.one_input(1)
        self.norm = nn.BatchNorm1d(n, eps=settings.eps, momentum=settings.factor)
        return [(n,)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised batch."""
        return cast(Tensor, self.norm(x))


class LayerNormParameters(Settings):
    """Parameters of `LayerNorm`: eps is added to the variance."""

    eps: float = Field(default=1e-5, gt=0)


@LAYERS.register("LayerNorm")
class LayerNorm(Layer):
    """Normalise the last dimension: y = gamma (x - mean) / sqrt(var + eps) + beta.

    Source: Ba et al. 2016.
    """

    Parameters = LayerNormParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create gamma = 1 and beta = 0."""
        shape = self.one_input()
        self.weight = init.constant((shape[-1],), 1.0)
        self.bias = init.constant((shape[-1],), 0.0)
        return [shape]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        eps = cast(LayerNormParameters, self.settings).eps
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, eps)
