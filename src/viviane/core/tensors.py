"""Tensors and arrays that users pass: their values as an array of NumPy, with no value lost."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from viviane.core.errors import DataError, VivianeError


def is_tensor(value: Any) -> bool:
    """Return whether it is a torch tensor; does not import torch, which the ETL does not need otherwise.

    Example:
        >>> is_tensor([1, 2])
        False
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def check_tensor(tensor: Any, where: str, error: type[VivianeError] = DataError) -> None:
    """Refuse a torch tensor that is sparse, nested, quantized, complex, or without memory.

    Args:
        tensor: of torch.
        where: the column, for the message.
        error: class of the error.

    Raises:
        VivianeError: of class `error`.
    """
    import torch

    kind = next((name for name in ("nested", "quantized") if getattr(tensor, f"is_{name}")), None)
    if kind is None and tensor.layout is not torch.strided:
        kind = "sparse"
    if kind is None and tensor.device.type == "meta":
        kind = "meta"
    if kind is None and tensor.is_complex():
        kind = "complex"
    if kind is not None:
        raise error("a tensor's values cannot be read", where=where, value=f"a {kind} tensor",
                    allowed="dense tensors of real numbers", fix="make it dense: values.to_dense()")  # fmt: skip


def tensor_array(tensor: Any, where: str) -> NDArray[Any]:
    """Return a torch tensor as an array; types that NumPy lacks, such as bfloat16, become float32.

    Raises:
        DataError: see `check_tensor`.

    Example:
        >>> import torch
        >>> tensor_array(torch.tensor([1.5], dtype=torch.bfloat16), "price")
        array([1.5], dtype=float32)
    """
    import torch

    check_tensor(tensor, where)
    known = (torch.float16, torch.float32, torch.float64)
    plain = tensor.detach()
    if plain.is_floating_point() and plain.dtype not in known:
        plain = plain.float()
    found: NDArray[Any] = plain.resolve_neg().cpu().numpy()
    return found


def float_array(values: Any, where: str, error: type[VivianeError] = DataError) -> NDArray[np.float32]:
    """Return numbers as a contiguous, writable array of float32, of any shape.

    Raises:
        VivianeError: of class `error`: they are no real numbers, or masked.

    Example:
        >>> float_array([[1, 2.5]], "vectors")
        array([[1. , 2.5]], dtype=float32)
    """
    check_mask(values, where, error)
    try:
        if is_tensor(values):
            check_tensor(values, where, error)
            values = tensor_array(values, where)
        found = np.asarray(values)
        if found.dtype.kind == "O":
            found = np.asarray(values, dtype=np.float64)  # Python's numbers
    except (TypeError, ValueError, OverflowError, RuntimeError) as problem:  # the last of tensors inside lists
        raise error(f"{where} are no numbers", value=str(problem)[:200]) from None
    if found.dtype.kind not in "fiub":
        raise error(f"{where} are no numbers", value=str(found.dtype))
    with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite
        plain = np.ascontiguousarray(found, dtype=np.float32)
    return plain if plain.flags.writeable else plain.copy()  # torch takes no other


def check_mask(values: Any, where: str, error: type[VivianeError] = DataError) -> None:
    """Refuse a masked array of NumPy with masked values, whose numbers mean nothing.

    Example:
        >>> check_mask(np.ma.masked_array([3, 4], [True, False]), "column 'user'")
        Traceback (most recent call last):
        ...
        viviane.core.errors.DataError: values of an array are masked
          where:   column 'user'
          value:   '1 of 2'
          do:      values.filled(...), or a list with None where the ETL cleans the rows
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        count = int(np.ma.getmaskarray(values).sum())
        raise error("values of an array are masked", where=where, value=f"{count} of {values.size}",
                    fix="values.filled(...), or a list with None where the ETL cleans the rows")  # fmt: skip
