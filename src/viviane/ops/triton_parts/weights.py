"""Weights of dense layers on a GPU: packed in the products' dtype by one launch, their gradients kept in float32."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.packing import Packing, packing
from viviane.ops.triton_parts.launch import ceil_div, few_programs, on_device

_BLOCK = 4096


def pack(tensors: list[Tensor], layout: Packing, dtype: torch.dtype) -> Tensor:
    """Copy matrices and vectors to their places in one tensor, with zeros behind the rows of padded matrices.

    Example:
        >>> pack([torch.ones(1, 1)], packing([(1, 1)], torch.float32), torch.float32)[:4]  # doctest: +SKIP
        tensor([1., 0., 0., 0.], device='cuda:0')
    """
    packed = torch.empty(layout.size, dtype=dtype, device=tensors[0].device)
    sources = tuple(one.detach().contiguous() for one in tensors)
    counts = tuple(math.prod(shape) for shape in layout.shapes)
    widths = tuple(one.shape[-1] for one in sources)
    new_widths = tuple(shape[-1] for shape in layout.shapes)
    programs = ceil_div(few_programs(packed.device), len(sources))  # smaller kernels find room beside them
    with on_device(packed):
        pack_kernel[(min(ceil_div(max(counts), _BLOCK), programs), len(sources))](
            sources, counts, widths, new_widths, layout.starts, packed, block=_BLOCK, num_warps=8
        )
    return packed


def pack_weights(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return matrices and vectors side by side in one tensor, as `viviane.ops.packing` lays them out."""
    return pack(tensors, packing([one.shape for one in tensors], dtype), dtype)


@triton.jit
def pack_kernel(sources, counts, widths, new_widths, starts, out, block: tl.constexpr):
    """Copy blocks of one source; the second grid axis selects it."""
    for i in tl.static_range(len(sources)):
        if tl.program_id(1) == i:
            for first in range(tl.program_id(0) * block, counts[i], tl.num_programs(0) * block):
                n = first + tl.arange(0, block)
                here = n < counts[i]
                if widths[i] == new_widths[i]:
                    values = tl.load(sources[i] + n, mask=here, other=0.0)
                else:
                    row = n // new_widths[i]
                    column = n - row * new_widths[i]
                    values = tl.load(sources[i] + row * widths[i] + column, mask=here & (column < widths[i]), other=0.0)
                tl.store(out + starts[i] + n, values.to(out.dtype.element_ty), mask=here)


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad^T x, summed in float32 and, where the weights are float32, not rounded to 16 bits on the way.

    Example:
        >>> weight_gradient(torch.ones(2, 1).half(), torch.ones(2, 3).half(), torch.float32).tolist()
        [[2.0, 2.0, 2.0]]
    """
    if dtype != torch.float32 or grad.dtype == dtype:
        return (grad.t() @ x).to(dtype)
    if not grad.is_cuda:  # the interpreter's tensors
        return grad.float().t() @ x.float()
    return torch.mm(grad.t(), x, out_dtype=torch.float32)
