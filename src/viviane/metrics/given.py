"""Checks of what metrics are given: rows of a batch as flat tensors, columns as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.core.errors import DataError
from viviane.core.tensors import check_mask, check_tensor, tensor_array


def flat(value: Any, what: str) -> Tensor:
    """Return numbers as a flat tensor, where they are; arrays and lists are copied to the CPU.

    Raises:
        DataError: they are no real numbers.

    Example:
        >>> flat(np.array([[1, 2]]), "labels").tolist()
        [1, 2]
    """
    if not isinstance(value, Tensor):
        return torch.from_numpy(np.require(_array(value, what), requirements=["C", "W"]).reshape(-1))
    check_tensor(value, what)
    return value.detach().flatten()


def flat_rows(predictions: Any, labels: Any, weight: Any = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return predictions, labels and weights of one batch, flat and of one length; see `flat`.

    Raises:
        DataError: they differ in length, or are no real numbers.
    """
    p, y = flat(predictions, "predictions"), flat(labels, "labels")
    w = None if weight is None else flat(weight, "weights")
    for what, one in (("labels", y), ("weights", w)):
        if one is not None and len(one) != len(p):
            raise DataError(f"predictions and {what} differ in number", value=f"{len(p)} and {len(one)}")
    return p, y, w


def columns(**given: Any) -> list[Any]:
    """Return columns as arrays of one length, in native byte order; where `weights` are None they stay None.

    Raises:
        DataError: a column is no vector of real numbers, or they differ in length.

    Example:
        >>> columns(scores=[0.5, 1.0], labels=[0, 1], weights=None)
        [array([0.5, 1. ]), array([0, 1]), None]
    """
    optional = ("weights",)
    found = {n: None if one is None and n in optional else _array(one, n) for n, one in given.items()}
    sizes = {name: one.shape for name, one in found.items() if one is not None}
    if any(len(shape) != 1 for shape in sizes.values()) or len(set(sizes.values())) > 1:
        raise DataError("columns must be vectors of one length", value=sizes, allowed="(n,)")
    return list(found.values())


def _array(value: Any, what: str) -> NDArray[Any]:
    check_mask(value, what)
    try:
        found = tensor_array(value, what) if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError("not an array of numbers", where=what, value=type(value).__name__) from error
    if found.dtype.kind not in "fiub":
        raise DataError("not an array of numbers", where=what, value=f"{type(value).__name__} of {found.dtype}",
                        allowed="real numbers")  # fmt: skip
    return found.astype(found.dtype.newbyteorder("="), copy=False)
