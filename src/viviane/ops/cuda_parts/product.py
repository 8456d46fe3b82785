"""Products on Hopper whose tiles meet others before they are stored: launches of the kernel in `product_source`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from viviane.ops.cuda_parts.compiling import Kernel, nvrtc
from viviane.ops.cuda_parts.product_source import SOURCE
from viviane.ops.cuda_parts.tensor_maps import tensor_map
from viviane.ops.triton_parts.launch import ceil_div, multiprocessors
from viviane.ops.triton_parts.product import fits_tensor_copies

FORWARD, BACKWARD, LAST = range(3)
"""What a tile of the product meets; see `multiply`."""
_BAND = 128  # rows of a block
_ROWS = _COLUMNS = _STEP = 64
_THREADS = 384
_TILE = _ROWS * _COLUMNS * 2  # bytes
_HELD = 6  # steps of the left matrix in registers
_TILES = 8  # of two groups: two in, or on their way out, and the next two
_SUMS, _BARRIERS = 2048, 1024
_SHARED = 232448  # of a block on compute capability 9.0
_MOST_DEPTH = 512
_LEAST_ROWS = 2048  # below, blocks begin and end before it pays to hold half of a product in registers
_START = 4  # what a block takes to begin, in tiles


def serves(left: Tensor, *others: Tensor) -> bool:
    """Whether the kernel multiplies these: on a Hopper GPU, many rows of 16 bits, at most 512 deep."""
    return (
        left.is_cuda
        and left.shape[0] >= _LEAST_ROWS
        and left.shape[1] <= _MOST_DEPTH
        and fits_tensor_copies(left, *others)
        and _has_hopper(left.device)
        and nvrtc() is not None
    )


def multiply(
    mode: int,
    left: Tensor,
    right: Tensor,
    tiles: Sequence[Tensor | None],
    *,
    bias: Tensor | None = None,
    layers: int = 1,
    status: Tensor | None = None,
) -> Tensor | None:
    """Fill the last of `tiles` from the product of two matrices and the others.

    Args:
        mode: with d the tile of the product,
            FORWARD: y = d + bias, out = first * y + x, of tiles first, x, y or None, out; `right` is (N, K);
            BACKWARD: out = d + grad, scaled = out * first, of tiles grad, first, scaled, out;
            LAST: out = d + g_1 + sum over l of g_{l+1} y_l, of tiles top, grads, ys, out.
        left: (M, K).
        right: (K, N), or (N, K); see above.
        tiles: (M, N) each; ys: y_0 ... y_{L-1} below one another, grads: g_1 ... g_{L-1}, where `top` is g_L.
        bias: (N,).
        layers: see LAST.
        status: int64; of LAST, where a result is NaN or infinite its first number becomes 1.

    Returns:
        Of BACKWARD the sums of the columns of `scaled` over 64 rows each, (M / 64, N) float32; else None.
    """
    given = [one for one in tiles if one is not None]
    keeps = len(given) == len(tiles)
    matrices = given if keeps else [*given, given[-1]]  # the kernel takes as many, and leaves the third alone
    (size, depth), width = left.shape, given[-1].shape[-1]
    bands, across = ceil_div(size, _BAND), ceil_div(width, _COLUMNS)
    share = _share(bands, across, multiprocessors(left.device))
    partial = None
    if mode == BACKWARD:
        partial = torch.empty(ceil_div(size, _ROWS), width, dtype=torch.float32, device=left.device)
    maps = [tensor_map(left, _BAND, _STEP), tensor_map(right, _STEP, _COLUMNS)]
    maps += [tensor_map(one.view(-1, width), _ROWS, _COLUMNS) for one in matrices]
    pointers = [ctypes.c_void_p(None if one is None else one.data_ptr()) for one in (left, bias, partial, status)]
    numbers = [ctypes.c_int(one) for one in (size, width, depth, across, share)]
    kernel, shared = _kernel(mode, ceil_div(depth, _STEP), layers, keeps, left.dtype, left.device)
    kernel.launch(bands * ceil_div(across, share), _THREADS, [*maps, *pointers, *numbers], shared)
    return partial


def _share(bands: int, across: int, multiprocessors: int) -> int:
    """Return how many tiles of a band a block takes, so that all blocks end early.

    Example:
        >>> _share(128, 54, 132), _share(64, 54, 132), _share(4, 54, 132)
        (54, 27, 2)
    """

    def cost(parts: int) -> int:
        share = ceil_div(across, parts)
        waves = ceil_div(bands * ceil_div(across, share), multiprocessors)
        return waves * (share + _START)

    return ceil_div(across, min(range(1, across + 1), key=cost))


@cache
def _kernel(
    mode: int, depths: int, layers: int, keeps: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Kernel, int]:
    """Return the kernel and its shared memory in bytes."""
    fixed = (_TILES + 2 * max(0, depths - _HELD)) * _TILE + _SUMS + _BARRIERS
    stages = (_SHARED - fixed) // _TILE
    shared = fixed + stages * _TILE
    defines = {"MODE": mode, "PASSES": layers, "DEPTHS": depths, "STAGES": stages, "KEEPS": int(keeps)}
    defines |= {"BFLOAT16": 1} if dtype == torch.bfloat16 else {}
    return Kernel(SOURCE, "tile_product_kernel", defines, device, shared, only_here=True), shared


@cache
def _has_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)
