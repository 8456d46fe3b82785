"""Fully connected layers of a few rows on a GPU, without gradients: all layers in one launch.

For a row or two cuBLAS takes kernels whose launches cost more than their work: here the programs of one launch compute
a layer, wait for one another, and go on with the next. Weights come from the L2 cache. A row's result depends on that
row alone, whatever the number of rows: a padded batch has the bits of the rows that it was made from.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from viviane.ops.mlp.gpu import prepared
from viviane.ops.mlp.gpu_few_rows_kernels import few_rows_kernel
from viviane.ops.packing import packing, padded_width
from viviane.ops.triton_parts.launch import ceil_div, multiprocessors, on_device
from viviane.ops.triton_parts.weights import pack_weights

_ROWS: Final = 16  # of a tile, which tensor cores want; more rows than it has are taken by cuBLAS sooner
_COLUMNS: Final = 16
_STEP: Final = 256
_STAGES: Final = 3
_MOST_PLAIN: Final = 64  # inputs that are read one by one where their rows do not begin at multiples of 16 bytes
_UNIT: Final = 8  # numbers of 16 bits that are read at once


class _Plan(NamedTuple):
    """Arguments of a launch for a chain of layers.

    Args:
        layers: (layers, 6): first weight, first bias, k, width of a row of W, n, whether a ReLU follows.
        widest: of the activations between layers.
        programs: as many as the layer with the most columns has tiles, and as run at once.
    """

    layers: Tensor
    widest: int
    programs: int


def forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], relu: list[bool], dtype: torch.dtype, packed: Tensor | None
) -> Tensor:
    """Return the last layer's activations, (B, n).

    Args:
        x: (B, k), B at most 16.
        weights, biases, relu, packed: of two layers or more.
        dtype: of 16 bits.
    """
    shapes = tuple(tuple(one.shape) for one in weights)
    plan = _plan(shapes, tuple(relu), dtype, x.device)
    whole = pack_weights([*weights, *biases], dtype) if packed is None else packed
    x = x if _is_read(x) else prepared(x, dtype)
    size, last = x.shape[0], shapes[-1][0]
    out = torch.empty(size, last, dtype=dtype, device=x.device)
    between = torch.empty(2, _ROWS, plan.widest, dtype=dtype, device=x.device)
    together = {"launch_cooperative_grid": True} if x.is_cuda else {}
    with on_device(x):
        few_rows_kernel[(plan.programs,)](
            x, whole, plan.layers, between, out, _arrivals(_stream_of(x), plan.programs, x.device), size, x.shape[1],
            len(shapes), widest=plan.widest, wide=x.shape[1] % _UNIT == 0, rows=_ROWS, columns=_COLUMNS, step=_STEP,
            stages=_STAGES, num_warps=4, **together,
        )  # fmt: skip
    return out


def _is_read(x: Tensor) -> bool:
    """Whether the kernel reads this input as it is."""
    if not x.is_contiguous():
        return False
    return x.shape[1] <= _MOST_PLAIN or (x.shape[1] % _UNIT == 0 and x.data_ptr() % 16 == 0)


@cache
def _plan(
    shapes: tuple[tuple[int, ...], ...], relu: tuple[bool, ...], dtype: torch.dtype, device: torch.device
) -> _Plan:
    """Describe layers; kept for good, since a CUDA graph may go on reading it."""
    count = len(shapes)
    layout = packing([*shapes, *(shape[:1] for shape in shapes)], dtype)
    rows = [
        (layout.starts[i], layout.starts[count + i], k, layout.shapes[i][1], n, int(relu[i]))
        for i, (n, k) in enumerate(shapes)
    ]
    widest = max(padded_width(n, dtype) for n, _ in shapes)
    # Programs of the interpreter run one after another, and would wait for ever.
    most = multiprocessors(device) if device.type == "cuda" else 1
    return _Plan(torch.tensor(rows, dtype=torch.int32).to(device), widest, min(ceil_div(widest, _COLUMNS), most))


def _stream_of(x: Tensor) -> int:
    return int(torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0


@cache
def _arrivals(stream: int, programs: int, device: torch.device) -> Tensor:
    """Return the counter of programs that came to a meeting point.

    One for each stream, where launches follow one another, and number of programs: it is a multiple of it in between.
    """
    return torch.zeros(1, dtype=torch.int64, device=device)
