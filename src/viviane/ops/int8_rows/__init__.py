"""Rows of 8 bits a number, each with a scale and an offset of its own: written once, then looked up and pooled.

A row x of D numbers is kept as whole numbers q from 0 to 255, with x' = scale * q + offset, offset = min(x) and
scale = (max(x) - min(x)) / 255. So |x - x'| is at most half the scale, up to the rounding of float32.

Layout: (R, bytes_of(D)), uint8: D numbers, padding to a multiple of 4, then scale and offset, float32. That is the
"fused 8-bit rowwise" form of FBGEMM and TorchRec where D is a multiple of 4.

Shapes: R rows, D numbers of each, N entries, B rows of the batch, F features, W columns of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.dispatch import implementation

__all__ = ["bytes_of", "dequantize", "gather_rows", "is_int8", "parts_of", "pool_rows", "quantize"]

_TAIL_BYTES: Final = 8
_PART_ROWS: Final = 1 << 16


def bytes_of(dim: int) -> int:
    """Return the bytes of a row.

    Example:
        >>> bytes_of(16), bytes_of(5)
        (24, 16)
    """
    return -(-dim // 4) * 4 + _TAIL_BYTES


def is_int8(storage: Tensor) -> bool:
    """Return whether a table has rows of this form."""
    return storage.dtype == torch.uint8


def quantize(rows: Tensor) -> Tensor:
    """Return rows in 8 bits, (R, bytes_of(D)), uint8, on their device.

    Args:
        rows: (R, D), float32, float16 or bfloat16.

    Raises:
        VivianeError: a number is not finite; names the row.

    Example:
        >>> quantize(torch.tensor([[0.0, 1.0, 255.0]])).tolist()
        [[0, 1, 255, 0, 0, 0, 128, 63, 0, 0, 0, 0]]
    """
    num_rows, dim = rows.shape
    if not dim:
        raise VivianeError("rows of no numbers have no 8-bit form", value=tuple(rows.shape))
    found = torch.zeros(num_rows, bytes_of(dim), dtype=torch.uint8, device=rows.device)
    for first in range(0, num_rows, _PART_ROWS):
        part = rows[first : first + _PART_ROWS].to(torch.float64)
        finite = torch.isfinite(part).all(1)
        if not bool(finite.all()):
            raise VivianeError(
                "a row has a number that is not finite", where=f"row {first + int(finite.int().argmin())}"
            )
        low, high = part.amin(1), part.amax(1)
        scale, offset = ((high - low) / 255).to(torch.float32), low.to(torch.float32)
        steps = torch.where(scale > 0, scale, 1.0).to(torch.float64)  # all numbers of a row may be equal
        numbers = ((part - offset[:, None].to(torch.float64)) / steps[:, None]).round_().clamp_(0, 255)
        own = found[first : first + _PART_ROWS]
        own[:, :dim] = numbers.to(torch.uint8)
        own[:, -_TAIL_BYTES:] = torch.stack([scale, offset], 1).view(torch.uint8)
    return found


def parts_of(storage: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the numbers, (R, D), uint8, and the scale and offset of each row, (R, 2), float32; both copies.

    Example:
        >>> numbers, tails = parts_of(quantize(torch.tensor([[0.0, 1.0, 255.0]])), 3)
        >>> numbers.tolist(), tails.tolist()
        ([[0, 1, 255]], [[1.0, 0.0]])
    """
    check_storage(storage, dim)
    return storage[:, :dim].contiguous(), storage[:, -_TAIL_BYTES:].contiguous().view(torch.float32)


def dequantize(storage: Tensor, dim: int) -> Tensor:
    """Return rows as numbers, (R, D), float32.

    Example:
        >>> dequantize(quantize(torch.tensor([[0.0, 1.0, 255.0], [7.0, 7.0, 7.0]])), 3).tolist()
        [[0.0, 1.0, 255.0], [7.0, 7.0, 7.0]]
    """
    numbers, tails = parts_of(storage, dim)
    scale, offset = tails[:, :1], tails[:, 1:]
    # In float64 the product is exact, so that the sum is rounded as by one fused instruction, but for ties.
    found: Tensor = numbers.to(torch.float64) * scale.to(torch.float64) + offset.to(torch.float64)
    return found.to(torch.float32)


def gather_rows(
    storage: Tensor, dim: int, rows: Tensor, out: Tensor, columns: Sequence[int], weights: Tensor | None = None
) -> None:
    """Do what `viviane.ops.embedding_bag.gather_rows` does, with rows of 8 bits.

    Args:
        dim: D.

    Example:
        >>> out = torch.zeros(1, 4)
        >>> gather_rows(quantize(torch.tensor([[0.0, 255.0], [1.0, 1.0]])), 2, torch.tensor([[1, 0]]), out, [0, 2])
        >>> out.tolist()
        [[1.0, 1.0, 0.0, 255.0]]
    """
    check_storage(storage, dim)
    implementation("int8_rows", storage.device).gather_rows(storage, dim, rows, out, tuple(columns), weights)


def pool_rows(
    storage: Tensor, dim: int, rows: Tensor, offsets: Tensor, out: Tensor, columns: Sequence[int],
    weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Do what `viviane.ops.embedding_bag.pool_rows` does, with rows of 8 bits.

    Args:
        dim: D.
    """
    check_storage(storage, dim)
    module = implementation("int8_rows", storage.device)
    module.pool_rows(storage, dim, rows, offsets, out, tuple(columns), weights)


def check_storage(storage: Tensor, dim: int) -> None:
    """Refuse what is not a table of 8-bit rows of D numbers."""
    allowed = bytes_of(dim)
    if not is_int8(storage) or storage.dim() != 2 or storage.shape[1] != allowed or not storage.is_contiguous():
        raise VivianeError("not a table of 8-bit rows", value=f"{tuple(storage.shape)} of {storage.dtype}",
                           allowed=f"(R, {allowed}) of uint8, contiguous")  # fmt: skip
