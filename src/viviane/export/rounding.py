"""What rounding may do to each result of a program: its operations run again with results that are slightly off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

HALF_UNIT: Final = 2.0**-24  # of the last place of float32, as a share of the number
_WHOLE: Final = 2.0**24  # whole numbers below it are exact in float32
_SUMS: Final = ("mm", "addmm", "bmm", "baddbmm", "sum", "mean", "convolution")
"""Operations whose terms are rounded besides: where they cancel, the error follows the terms and not the sum."""


class RoundedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, each float64 result of an operation is off by half a unit of float32's last place, up or down by chance.

    Args:
        seed: of the directions.

    Example:
        >>> one = torch.tensor([0.1], dtype=torch.float64)
        >>> with RoundedOtherwise(0):
        ...     other = one + 0.2
        >>> bool(0 < (other - one - 0.2).abs() < 1e-7)
        True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and change what it returns."""
        if str(func.overloadpacket.__name__) in _SUMS:
            args = tree_map(self._moved, args)
        found = func(*args, **(kwargs or {}))
        if any(one.alias_info is not None for one in func._schema.returns):  # a view, or changed in place
            return found
        return tree_map(self._moved, found)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        signs = torch.randint(2, value.shape, generator=self._draw).to(value.device).double() * 2 - 1
        exact = (value == value.round()) & (value.abs() < _WHOLE)
        return torch.where(exact, value, value * (1 + signs * HALF_UNIT))


def spread(compute: Callable[[], NDArray[np.float32]], exact: NDArray[np.float32], runs: int) -> NDArray[np.float64]:
    """Return how far each result moves at most, over several runs with other roundings.

    Args:
        compute: runs the program in float64.
        exact: its results without roundings.
        runs: more of them miss fewer rows.
    """
    found = np.zeros(exact.shape)
    for seed in range(runs):
        with RoundedOtherwise(seed):
            other = compute()
        gap = np.abs(other.astype(np.float64) - exact)
        found = np.maximum(found, np.where(np.isfinite(gap), gap, 0.0))
    return found
