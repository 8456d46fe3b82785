"""Matrix products on a GPU's tensor cores, tile by tile, for kernels that do more with a tile than store it.

Operands come by Hopper's tensor copies (TMA), which want rows that begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNED_BYTES = 16


class TileShape(NamedTuple):
    """One program's tile of the result, the depth of one step of the sum, its warps, and steps in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Return what every kernel of tiles takes of it."""
        tile = {"rows": self.rows, "columns": self.columns, "step": self.depth}
        return {**tile, "num_warps": self.warps, "num_stages": self.stages}


def fits_tensor_copies(*matrices: Tensor) -> bool:
    """Whether tensor copies can read these matrices, and tensor cores multiply them, as they are.

    Example:
        >>> fits_tensor_copies(torch.ones(3, 8, dtype=torch.float16)), fits_tensor_copies(torch.ones(3, 8))
        (True, False)
    """
    return all(
        one.dtype in (torch.float16, torch.bfloat16)
        and one.is_contiguous()
        and one.shape[1] * one.element_size() % _ALIGNED_BYTES == 0
        and one.data_ptr() % _ALIGNED_BYTES == 0
        and one.numel() > 0
        for one in matrices
    )


def tiles_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a contiguous matrix for copies of (rows, columns) tiles.

    Example:
        >>> tiles_of(torch.ones(3, 8), 16, 16).block_shape
        [16, 16]
    """
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


@triton.jit
def tile_product(
    a,
    b,
    first_row,
    first_column,
    depth,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    transposed: tl.constexpr,
):
    """Return one tile of A B, or of A B^T where `transposed`, in float32: A (M, K), B (K, N) or (N, K)."""
    total = tl.zeros([rows, columns], dtype=tl.float32)
    for k in range(0, depth, step):
        left = a.load([first_row, k])
        if transposed:
            total = tl.dot(left, b.load([first_column, k]).T, total)
        else:
            total = tl.dot(left, b.load([k, first_column]), total)
    return total
