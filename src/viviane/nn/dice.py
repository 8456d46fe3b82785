"""The Dice activation of Deep Interest Networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor

from viviane.config.base import Settings
from viviane.nn.init import Initializer
from viviane.nn.registry import LAYERS, Layer, Shape


class PReLU_DiceParameters(Settings):  # noqa: N801 - HugeCTR's name
    """Parameters of `PReLU_Dice`.

    Args:
        elu_alpha: slope a of the part that is switched off.
        eps: added to the variance.
        factor: None, HugeCTR's rule, takes mean and variance from the batch, in evaluation too, so that a row's
            result depends on the rows next to it. A number keeps running statistics,
            running = factor batch + (1 - factor) running, and evaluates with them, as the paper does.
    """

    elu_alpha: float = 1.0
    eps: float = Field(default=1e-5, gt=0)
    factor: float | None = Field(default=None, gt=0, le=1)


class GlobalStatistics(NamedTuple):
    """Of a batch over all processes.

    Args:
        centred: x - mean, (B, n).
        mean, variance: (n,); the variance with the divisor `num_rows`.
        num_rows: of all processes, 0-dim.
    """

    centred: Tensor
    mean: Tensor
    variance: Tensor
    num_rows: Tensor


@LAYERS.register("PReLU_Dice")
class PReLU_Dice(Layer):  # noqa: N801 - HugeCTR's name
    """A rectifier whose switch moves with the data, for each feature over the batch, (B, n) -> (B, n).

        p = sigmoid((x - mean) / sqrt(var + eps))        var with the divisor B
        y = p x + (1 - p) a x

    The gradient runs through mean and variance; HugeCTR's leaves out what a row does to the other rows' statistics.
    16-bit input is computed in float32.

    Source: Zhou et al. 2018 (Deep Interest Network).

    Example:
        >>> layer = PReLU_Dice([(1,)], elu_alpha=0.0)
        >>> [round(y, 3) for y in layer(torch.tensor([[-1.0], [1.0]])).flatten().tolist()]
        [-0.269, 0.731]
    """

    Parameters = PReLU_DiceParameters
    statistics: Callable[[Tensor], GlobalStatistics] | None = None
    """Gives mean and variance in training of several processes; None: they are those of x."""

    @property
    def keeps_statistics(self) -> bool:
        """Whether running statistics are kept, and evaluation uses them."""
        return cast(PReLU_DiceParameters, self.settings).factor is not None

    def build(self, init: Initializer) -> list[Shape]:
        """Create the running statistics, where they are requested."""
        (n,) = self.one_input(1)
        if cast(PReLU_DiceParameters, self.settings).factor is not None:
            self.register_buffer("running_mean", torch.zeros(n))
            self.register_buffer("running_var", torch.ones(n))
        return [(n,)]

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation."""
        settings = cast(PReLU_DiceParameters, self.settings)
        if not x.shape[0] and (self.statistics is None or not self.training):
            return x  # no rows have no statistics; but other processes may have some
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training:
            p = self._switch(wide, settings).sigmoid_()  # its backward reads the result, the norm's only the input
        else:
            if settings.factor is None:
                var, mean = torch.var_mean(wide, 0, correction=0)
            else:
                mean, var = (cast(Tensor, one).to(wide.dtype) for one in (self.running_mean, self.running_var))
            p = ((wide - mean) * (var + settings.eps).rsqrt()).sigmoid()
        if settings.elu_alpha:  # without it, two passes less over rows that are many
            p = settings.elu_alpha + (1 - settings.elu_alpha) * p
        return (wide * p).to(x.dtype)

    def _switch(self, wide: Tensor, settings: PReLU_DiceParameters) -> Tensor:
        """Return (x - mean) / sqrt(var + eps) by batch norm's kernel, three times as fast as the formula's steps."""
        if self.statistics is not None:
            centred, mean, variance, _ = self.statistics(wide)
            if settings.factor is not None:
                self._follow(mean.detach(), variance.detach(), settings.factor)
            return centred * (variance + settings.eps).rsqrt()
        z, mean, inverse = torch.native_batch_norm(wide, None, None, None, None, True, 0.0, settings.eps)
        if settings.factor is not None:
            self._follow(mean.detach(), inverse.detach().square().reciprocal() - settings.eps, settings.factor)
        return z

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor, factor: float) -> None:
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            cast(Tensor, running).lerp_(new.to(cast(Tensor, running).dtype), factor)
