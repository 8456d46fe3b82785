"""Gradients of parameters that an operator of several layers has finished while it still computes others.

Autograd learns of an operator's gradients when it returns. Who sums them over GPUs can begin with the first ones while
the next layer's are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

Listener: TypeAlias = Callable[[Tensor, Tensor], None]

_listeners: dict[torch.device, Listener] = {}  # not a context variable: backward runs in threads of torch's own


@contextmanager
def telling_of_gradients(device: torch.device, listener: Listener) -> Iterator[None]:
    """Call `listener(parameter, gradient)` for gradients that operators on a device finish inside a `with` block.

    The gradient is an alias of what autograd will get: who keeps it does not keep autograd from taking it over. What
    other uses of the parameter add to it comes later.

    Example:
        >>> weight, found = torch.ones(2), []
        >>> with telling_of_gradients(weight.device, lambda parameter, gradient: found.append(gradient)):
        ...     tell_of_gradient(weight, torch.zeros(2))
        >>> found[0].tolist()
        [0.0, 0.0]
    """
    before = _listeners.get(device)
    _listeners[device] = listener
    try:
        yield
    finally:
        if before is None:
            del _listeners[device]
        else:
            _listeners[device] = before


def tell_of_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Tell the listener on the gradient's device, if there is one, that an operator's gradient is finished.

    Args:
        parameter: as the operator was given it.
        gradient: of its shape and type, contiguous: the very tensor that the operator returns.

    Example:
        >>> tell_of_gradient(torch.ones(2), torch.zeros(2))
    """
    listener = _listeners.get(gradient.device)
    if listener is not None and gradient.shape == parameter.shape and gradient.is_contiguous():
        listener(parameter, gradient.detach())
