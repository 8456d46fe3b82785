"""Fully connected layers of predictions: y = act(x W^T + b), act = ReLU or none.

Shapes: B rows, k inputs, n outputs.

On the CPU, without gradients, each output is summed in one order, which depends on n and k alone. A row's prediction is
then the same number in a batch of any size and on any number of threads. Where `reason` returns a reason, plain torch
computes it.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from viviane.core.errors import SchemaError
from viviane.ops.dispatch import choose, load
from viviane.ops.linear.reference import linear as plain

__all__ = ["linear", "reason"]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool = False, cross: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return act(x W^T + b), (..., n); with `cross` = (x_0, x_l), each (B, n), x_l + x_0 * (x W^T + b).

    Args:
        x: (..., k).
        weight: W (n, k).
        bias: b (n), or None.
        relu: whether a ReLU follows.
        cross: for a cross layer: the input of the first one, and of this one.

    Raises:
        SchemaError: shapes that do not fit.

    Example:
        >>> with torch.no_grad():
        ...     linear(torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([0.5])).tolist()
        [[2.5]]
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise SchemaError("weights (n, k) must fit rows (..., k)", value=f"{tuple(x.shape)}, {tuple(weight.shape)}")
    if reason(x, weight) is not None:
        return plain(x, weight, bias, relu, cross)
    found: Tensor = load("linear", "cpu").linear(x, weight, bias, relu, cross)
    return found


def reason(x: Tensor, weight: Tensor) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the kernel does.

    Example:
        >>> reason(torch.ones(1, 2), torch.ones(1, 2))
        'gradients are asked for'
    """
    if torch.is_grad_enabled():
        return "gradients are asked for"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "a trace reads plain torch"
    if x.device.type != "cpu" or choose(x.device) != "cpu":
        return "the kernel is for CPUs, and VIVIANE_OPS may choose plain torch"
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return "only float32 has a kernel"
    return machine_reason() if x.numel() and weight.numel() else "nothing to compute"


@cache
def machine_reason() -> str | None:
    """Return the reason why the kernel does not run on this machine, or None.

    Example:
        >>> machine_reason() is None or isinstance(machine_reason(), str)
        True
    """
    from viviane.ops.linear.cpu_tiles import HAS_FMA

    return None if HAS_FMA else "this processor has no instruction for a product and a sum"
