"""Normalisation layers."""

from __future__ import annotations

from typing import cast

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from viviane.config.base import Settings
from viviane.core.errors import SchemaError
from viviane.nn.init import Initializer, InitializerName
from viviane.nn.registry import LAYERS, Layer, Shape


class BatchNormParameters(Settings):
    """Parameters of `BatchNorm`.

    Args:
        factor: weight of the newest batch in the running statistics; 1.0, HugeCTR's default, keeps the last
            batch's alone, so most users want 0.1.
        eps: added to the variance.
        gamma_init_type, beta_init_type: "default" is gamma = 1, beta = 0.
    """

    factor: float = Field(default=1.0, gt=0, le=1)
    eps: float = Field(default=1e-5, gt=0)
    gamma_init_type: InitializerName = "default"
    beta_init_type: InitializerName = "default"


@LAYERS.register("BatchNorm")
class BatchNorm(Layer):
    """Normalise each feature over the batch: y = gamma (x - mean) / sqrt(var + eps) + beta, (B, n) -> (B, n).

    In training mean and var are the batch's, var with the divisor B. In evaluation they are the running statistics:
    running = factor batch + (1 - factor) running, there var with the divisor B - 1.

    Source: Ioffe and Szegedy 2015.

    Example:
        >>> import torch
        >>> layer = BatchNorm([(1,)], factor=0.1)
        >>> layer(torch.tensor([[1.0], [3.0]])).round(decimals=3).tolist()
        [[-1.0], [1.0]]
    """

    Parameters = BatchNormParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create gamma = 1, beta = 0 and the running statistics."""
        settings = cast(BatchNormParameters, self.settings)
        (n,) = self.one_input(1)
        self.norm = nn.BatchNorm1d(n, eps=settings.eps, momentum=settings.factor)
        self.norm.weight = _gain(init, "gamma", n, settings.gamma_init_type, 1.0)
        self.norm.bias = _gain(init, "beta", n, settings.beta_init_type, 0.0)
        return [(n,)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised batch.

        Raises:
            SchemaError: a training batch of one row, which has no variance.
        """
        check_variance(self.norm, x, self.name)
        return cast(Tensor, self.norm(x))


def check_variance(norm: nn.BatchNorm1d, x: Tensor, layer: str) -> None:
    """Refuse a training batch of one row, (1, n); several processes normalise over the global batch instead.

    Raises:
        SchemaError: the batch has no variance.
    """
    if norm.training and x.shape[0] == 1 and type(norm) is nn.BatchNorm1d:
        raise SchemaError(
            "a batch of one row has no variance to normalise with",
            where=f"layer {layer!r}",
            fix="leave the last, shorter batch out: Solver(drop_last=True)",
        )


class LayerNormParameters(Settings):
    """Parameters of `LayerNorm`.

    Args:
        eps: added to the variance.
        gamma_init_type, beta_init_type: "default" is gamma = 1, beta = 0.
    """

    eps: float = Field(default=1e-5, gt=0)
    gamma_init_type: InitializerName = "default"
    beta_init_type: InitializerName = "default"


@LAYERS.register("LayerNorm")
class LayerNorm(Layer):
    """Normalise the last dimension: y = gamma (x - mean) / sqrt(var + eps) + beta.

    Source: Ba et al. 2016.

    Example:
        >>> import torch
        >>> LayerNorm([(2,)])(torch.tensor([[1.0, 3.0]])).round(decimals=3).tolist()
        [[-1.0, 1.0]]
    """

    Parameters = LayerNormParameters

    def build(self, init: Initializer) -> list[Shape]:
        """Create gamma = 1 and beta = 0."""
        settings = cast(LayerNormParameters, self.settings)
        shape = self.one_input()
        if not shape:
            raise self.refuse("an input with a dimension beside the batch")
        self.weight = _gain(init, "gamma", shape[-1], settings.gamma_init_type, 1.0)
        self.bias = _gain(init, "beta", shape[-1], settings.beta_init_type, 0.0)
        return [shape]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor."""
        eps = cast(LayerNormParameters, self.settings).eps
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, eps)


def _gain(init: Initializer, name: str, n: int, kind: InitializerName, default: float) -> nn.Parameter:
    if kind == "default":
        return init.constant((n,), default)
    return init.weight(name, (n,), kind, fan_in=0, fan_out=n)
