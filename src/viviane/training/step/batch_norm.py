"""Batch normalization over the global batch.

Shapes: B rows of this process, n features; a process may have one row of a global batch, or none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from viviane.nn.dice import GlobalStatistics, PReLU_Dice
from viviane.parallel import Group


class _Sum(torch.autograd.Function):
    """Sum over the processes; gradients are summed in the same way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce(value.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_reduce(gradients[0].contiguous().clone()), None


def global_statistics(x: Tensor, group: Group) -> GlobalStatistics:
    """Return the statistics of the global batch of x, (B, n); gradients flow through them over all processes.

    Two all-reduces of n + 1 values in forward, two in backward.
    """
    ones = x.new_full((1,), float(len(x)))
    sums = _Sum.apply(torch.cat([x.sum(0), ones]), group)  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean
    variance = _Sum.apply(centred.square().sum(0), group) / count  # type: ignore[no-untyped-call]
    return GlobalStatistics(centred, mean, variance, count)


class GroupBatchNorm1d(nn.BatchNorm1d):
    """nn.BatchNorm1d whose mean and variance in training are those of the global batch, (B, n) -> (B, n).

    Two all-reduces of n + 1 values in forward, two in backward; none in evaluation.

    Args:
        norm: its parameters and running statistics are used.
        group: the processes.
    """

    def __init__(self, norm: nn.BatchNorm1d, group: Group) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, False, False)
        self.affine, self.track_running_stats = norm.affine, norm.track_running_stats
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm._buffers.items():
            self._buffers[name] = buffer
        self.group = group
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base's name of it
        """Return the normalized batch."""
        if not self.training or input.dim() != 2:
            return super().forward(input)
        centred, mean, variance, count = global_statistics(input.float(), self.group)
        self._follow(mean.detach(), variance.detach(), count)
        y: Tensor = centred * torch.rsqrt(variance + self.eps)
        if self.affine:
            y = y * self.weight + self.bias
        return y.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics as nn.BatchNorm1d does, with the unbiased variance."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.float()
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance * (count / (count - 1).clamp_min(1.0)), factor)


def join_batch_statistics(module: nn.Module, group: Group) -> None:
    """Let layers that normalise over the batch do so over the global batch; names of weights stay the same.

    Every nn.BatchNorm1d inside the module is replaced by a `GroupBatchNorm1d`. A `PReLU_Dice` that keeps running
    statistics gets those of the global batch; without them it follows the batch of its process, as HugeCTR's does.
    """
    if group.size == 1:
        return
    for part in list(module.modules()):
        if isinstance(part, PReLU_Dice) and part.keeps_statistics:
            part.statistics = partial(global_statistics, group=group)
        for name, child in part.named_children():
            if type(child) is nn.BatchNorm1d or isinstance(child, GroupBatchNorm1d):
                part._modules[name] = GroupBatchNorm1d(child, group)
