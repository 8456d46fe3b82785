"""The dense update on a GPU: one launch over all tensors, whose addresses lie in a table on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.capture import is_capturing
from viviane.ops.dense_update import PIECE, check_moved, gradient_type
from viviane.ops.dense_update.gpu_kernels import (
    check_columns_kernel,
    check_kernel,
    mark_kernel,
    move_kernel,
    update_scaled_status_kernel,
    update_status_kernel,
)
from viviane.ops.rules import dense_rules
from viviane.ops.triton_parts.arithmetic import KINDS
from viviane.ops.triton_parts.launch import ceil_div, on_device

if TYPE_CHECKING:
    from viviane.ops.dense_update import Workspace

_COLUMN_ROWS, _COLUMN_BLOCK = 4, 1024
_MOST_RECORDS = 64  # a kernel's arguments have little room
_LARGE_BLOCK, _PER_PROGRAM = 4096, 8  # of the check: numbers at once, and how many times


def move_tensors(
    rule: str,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor | Sequence[float],
    *,
    inside: bool,
    decays: bool,
    scale: Tensor | None,
    gate: Tensor | None,
    workspace: Workspace,
) -> None:
    """Move parameters and state in place."""
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor(numbers, dtype=torch.float64, device=params[0].device)
    gradients = [one.contiguous() for one in gradients]
    columns = [params, gradients, *states]
    check_moved(params, gradients, states)
    given = KINDS[gradient_type(gradients)]
    pieces = _pieces(params, PIECE, workspace)
    table, wide = _addresses(columns, workspace)
    with on_device(params[0]):
        move_kernel[(len(pieces),)](
            table, pieces, numbers, scale, gate, move=dense_rules()[rule].gpu_dense, inside=inside, decays=decays,
            columns=len(columns), wide=wide, given=given, block=PIECE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def check_finite(tensors: Sequence[Tensor], status: Tensor, workspace: Workspace) -> None:
    """Set status[0] to 1 where any number is NaN or infinite."""
    if len(tensors) == 1 and _is_columns(tensors[0]):
        _check_columns(tensors[0], status)
        return
    if any(one.dtype != tensors[0].dtype or not one.is_contiguous() for one in tensors):
        raise VivianeError("the tensors to check must be contiguous, of one type")
    if len(tensors) == 1:
        size = tensors[0].numel()
        with on_device(status):
            check_kernel[(ceil_div(size, _LARGE_BLOCK * _PER_PROGRAM),)](
                tensors[0], None, size, status, wide=_addresses_are_wide(tensors), given=None,
                block=_LARGE_BLOCK, turns=_PER_PROGRAM, num_warps=4,
            )  # fmt: skip
        return
    given = KINDS[gradient_type(tensors)]
    pieces = _pieces(tensors, _LARGE_BLOCK, workspace)
    table, wide = _addresses([tensors], workspace)
    with on_device(status):
        check_kernel[(len(pieces),)](
            table, pieces, 0, status, wide=wide, given=given, block=_LARGE_BLOCK, turns=1, num_warps=4
        )  # fmt: skip


def _is_columns(tensor: Tensor) -> bool:
    """Whether these are neighbouring columns of a wider matrix."""
    return tensor.dim() == 2 and not tensor.is_contiguous() and tensor.stride(1) == 1


def _check_columns(tensor: Tensor, status: Tensor) -> None:
    (size, width), apart = tensor.shape, tensor.stride(0)
    with on_device(status):
        check_columns_kernel[(ceil_div(size, _COLUMN_ROWS),)](
            tensor, size, width, apart, status,
            aligned=math.gcd(16, apart), rows=_COLUMN_ROWS, block=_COLUMN_BLOCK, num_warps=4,
        )  # fmt: skip


def mark(records: Sequence[Tensor], status: Tensor) -> None:
    """Set status[0] to 1 where the first number of one of the records is not 0."""
    with on_device(status):
        for first in range(0, len(records), _MOST_RECORDS):
            mark_kernel[(1,)](tuple(records[first : first + _MOST_RECORDS]), status, num_warps=1)


def update_status(loss: Tensor | None, status: Tensor, gate: Tensor) -> None:
    """Decide whether a step may move weights, and count it."""
    with on_device(status):
        update_status_kernel[(1,)](loss, status, gate, num_warps=1)


def update_scaled_status(
    loss: Tensor, status: Tensor, overflow: Tensor, scaling: Tensor, gate: Tensor, *, interval: int, largest: float
) -> None:
    """Decide as `update_status` does, under a loss scale that follows overflows."""
    with on_device(status):
        update_scaled_status_kernel[(1,)](loss, status, overflow, scaling, gate, float(interval), largest, num_warps=1)


def _pieces(tensors: Sequence[Tensor], block: int, workspace: Workspace) -> Tensor:
    """Return for each program (tensor, first number, numbers), (P, 3), int64; kept while the sizes stay."""
    sizes = tuple(one.numel() for one in tensors)
    if workspace.known != (sizes, block):
        found = [(i, start, size) for i, size in enumerate(sizes) for start in range(0, size, block)]
        workspace.tensors["pieces"] = _to_device(found, (len(found), 3), tensors[0].device, workspace)
        workspace.known = (sizes, block)
    return workspace.tensors["pieces"]


def _addresses(columns: Sequence[Sequence[Tensor]], workspace: Workspace) -> tuple[Tensor, bool]:
    """Return the tensors' addresses, (tensors, columns), int64, and whether all allow loads of four numbers."""
    rows = [[one.data_ptr() for one in row] for row in zip(*columns, strict=True)]
    wide = all(map(_addresses_are_wide, columns))
    shape = (len(rows), len(columns))
    return _to_device(rows, shape, columns[0][0].device, workspace), wide


def _addresses_are_wide(tensors: Sequence[Tensor]) -> bool:
    """Whether a thread may load four numbers at once."""
    return all(one.data_ptr() % (4 * one.itemsize) == 0 for one in tensors)


def _to_device(
    rows: Sequence[Sequence[int]], shape: tuple[int, ...], device: torch.device, workspace: Workspace
) -> Tensor:
    host = torch.tensor(rows, dtype=torch.int64).view(shape)
    if is_capturing(device):
        return workspace.take(host)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
