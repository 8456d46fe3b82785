"""Operators of several kernels in an eager step: one node of the autograd graph, without torch's dispatcher.

A `torch.library` operator lets compilers and exporters take its kernels whole. An eager call of it costs the host 100
us and more, for nested inputs, their gradients, and the checks of the dispatcher. An `autograd.Function` over the same
kernels costs a fraction of it and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_PLAIN = frozenset({Tensor, nn.Parameter, type(None)})


class Kernels(NamedTuple):
    """What a `torch.library` operator registers: its arguments may be tensors, lists of tensors and values.

    Args:
        forward: computes a tensor, a tuple or a list of tensors.
        setup: (ctx, inputs, output) keeps what `gradient` needs.
        gradient: (ctx, the outputs' gradients) gives those of the inputs; a list of outputs has a list of gradients.
    """

    forward: Callable[..., Any]
    setup: Callable[..., None]
    gradient: Callable[..., tuple[Any, ...]]


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a call must go through torch's dispatcher: a compiler, an exporter, a mode or a transform follows it.

    Args:
        tensors: the inputs.

    Example:
        >>> is_traced(torch.ones(1)), torch.compile(is_traced, backend="eager")(torch.ones(1))  # doctest: +SKIP
        (False, True)
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)):
        return True
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def is_differentiated(grad: Tensor) -> bool:
    """Whether the kernels of a gradient must go through torch's dispatcher: they are traced, or differentiated again.

    Of the latter the library operator says that it has no gradient; called alone, kernels would record parts of one.

    Example:
        >>> with torch.no_grad():  # as in backward, unless its graph is to be created
        ...     is_differentiated(torch.ones(1))
        False
    """
    return torch.is_grad_enabled() or is_traced(grad)


def call(kernels: Kernels, *inputs: Any) -> Any:
    """Return what `kernels.forward` computes, as a node of the autograd graph where an input needs a gradient.

    Example:
        >>> def save(ctx, inputs, output):
        ...     ctx.save_for_backward(*inputs)
        >>> square = Kernels(lambda x: x * x, save, lambda ctx, grad: (2 * ctx.saved_tensors[0] * grad,))
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> call(square, x).backward()
        >>> x.grad
        tensor(6.)
    """
    flat: list[Any] = []
    lengths: list[int | None] = []
    for one in inputs:
        if isinstance(one, list):
            flat += one
            lengths.append(len(one))
        else:
            flat.append(one)
            lengths.append(None)
    if not torch.is_grad_enabled() or not any(isinstance(one, Tensor) and one.requires_grad for one in flat):
        return kernels.forward(*inputs)
    return _Node.apply(kernels, inputs, lengths, *flat)  # type: ignore[no-untyped-call]


class _Node(torch.autograd.Function):
    """One node for all kernels; torch finds tensors among the flat arguments, and the kernels read the nested ones."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, inputs: tuple[Any, ...], lengths: list[int | None], *flat: Any
    ) -> Tensor | tuple[Tensor, ...]:
        output = kernels.forward(*inputs)
        kernels.setup(ctx, inputs, output)
        ctx.gradient, ctx.lengths, ctx.is_list = kernels.gradient, lengths, isinstance(output, list)
        return tuple(output) if ctx.is_list else output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.gradient(ctx, list(grads)) if ctx.is_list else ctx.gradient(ctx, *grads)
        flat: list[Any] = [None, None, None]
        for one, length in zip(found, ctx.lengths, strict=True):
            if length is None:
                flat.append(one)
            else:
                flat += [None] * length if one is None else one
        return tuple(flat)
