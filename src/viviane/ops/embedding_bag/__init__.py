"""Look rows up in a table, and pool them into bags.

Shapes: R rows of the storage, D its width, N entries (one row looked up once each), B rows of the batch, F features,
W columns of the output.

Rows are float32, float16 or bfloat16; sums are made in float32 and rounded once, to nearest, into the output, which
may be of another of these types. Row numbers are int32 or int64; the caller has checked that 0 <= row < R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.core.errors import VivianeError
from viviane.ops.dispatch import implementation
from viviane.ops.row_update import check_table

__all__ = ["entry_bags", "entry_sources", "gather_rows", "mean_weights", "pool_rows"]

_WHOLE = (torch.int32, torch.int64)


def gather_rows(
    storage: Tensor,
    rows: Tensor,
    out: Tensor,
    columns: Sequence[int],
    weights: Tensor | None = None,
    *,
    aside: bool = False,
) -> None:
    """Copy one row for each feature of each sample: out[b, columns[f] : + D] = weights[b, f] * storage[rows[b, f]].

    Other columns of `out` stay as they are.

    Args:
        storage: (R, D), contiguous.
        rows: (B, F), int32 or int64, contiguous.
        out: (B, W), contiguous or columns of a wider one.
        columns: F columns of `out`, each followed by room for D.
        weights: (B, F), float32, or None for ones.
        aside: leave most of a GPU to other kernels: for an `out` behind a link, which is slower than the memory.

    Example:
        >>> out = torch.zeros(1, 6)
        >>> gather_rows(torch.eye(3), torch.tensor([[2, 0]]), out, [3, 0])
        >>> out.tolist()
        [[1.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    _check("rows", rows, (out.shape[0], len(columns)))
    _check_call(storage, rows, out, columns, weights)
    module = implementation("embedding_bag", storage.device)
    module.gather_rows(storage, rows, out, tuple(columns), weights, aside=aside)


def pool_rows(
    storage: Tensor,
    rows: Tensor,
    offsets: Tensor,
    out: Tensor,
    columns: Sequence[int],
    weights: Tensor | None = None,
) -> None:
    """Sum rows by bag: out[b, columns[f] : + D] = sum of weights[n] * storage[rows[n]] over bag f * B + b.

    Bag k has the entries offsets[k] <= n < offsets[k + 1]; an empty bag gives zeros. Every combiner is this sum with
    its own weights: ones for "sum", `mean_weights` for "mean". The entries of a bag are added in a fixed order.
    Other columns of `out` stay as they are.

    Args:
        storage: (R, D), contiguous.
        rows: (N,), int32 or int64, contiguous.
        offsets: (F * B + 1,), int64, rising from 0 to N: the bags of the first feature, then of the second, ...
        out: (B, W), contiguous or columns of a wider one.
        columns: F columns of `out`, each followed by room for D.
        weights: (N,), float32, or None for ones.

    Example:
        >>> out = torch.empty(3, 3)
        >>> pool_rows(torch.eye(3), torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2, 3]), out, [0])
        >>> out.tolist()
        [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    _check("offsets", offsets, (len(columns) * out.shape[0] + 1,), (torch.int64,))
    _check("rows", rows, (len(rows),))
    _check_call(storage, rows, out, columns, weights)
    implementation("embedding_bag", storage.device).pool_rows(storage, rows, offsets, out, tuple(columns), weights)


def mean_weights(offsets: Tensor, counted: Tensor | None, weights: Tensor | None, num_entries: int) -> Tensor:
    """Return the weights that turn a sum by bag into a mean: c w / (sum of c w over the bag), (N,), float32.

    Args:
        offsets: (B + 1,), int64.
        counted: (N,), bool; entries that count (c), or None where all do.
        weights: (N,), float32, or None for ones; a bag whose weights sum to zero gives zeros.
        num_entries: N.

    Example:
        >>> mean_weights(torch.tensor([0, 2, 3]), None, None, 3).tolist()
        [0.5, 0.5, 1.0]
    """
    bags = entry_bags(offsets, num_entries)
    if counted is None and weights is None:
        return offsets.diff().to(torch.float32).reciprocal()[bags]
    if weights is None:
        assert counted is not None
        running = F.pad(counted.to(torch.int64).cumsum(0), (1, 0))
        totals = (running[offsets[1:]] - running[offsets[:-1]]).to(torch.float32)
        share = counted.to(torch.float32)
    else:
        share = weights if counted is None else weights * counted
        entries = torch.arange(num_entries, device=share.device)
        totals = share.new_empty(len(offsets) - 1, 1)
        pool_rows(share.unsqueeze(1).contiguous(), entries, offsets, totals, [0])
        totals = totals.squeeze(1)
    return share * torch.where(totals == 0, 0.0, totals.reciprocal())[bags]


def entry_bags(offsets: Tensor, num_entries: int) -> Tensor:
    """Return the bag of each entry, (N,), int64.

    On a GPU, where offsets may be wrong until their check is read, an entry gets some bag anyway.

    Example:
        >>> entry_bags(torch.tensor([0, 2, 2, 3]), 3).tolist()
        [0, 0, 2]
    """
    if offsets.is_cuda:  # repeat_interleave would write out of bounds there
        entries = torch.arange(num_entries, dtype=offsets.dtype, device=offsets.device)
        return torch.searchsorted(offsets[1:], entries, right=True).clamp_(max=max(len(offsets) - 2, 0))
    bags = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=num_entries)


def entry_sources(offsets: Tensor | None, columns: Sequence[int], size: int, apart: int, out: Tensor) -> None:
    """Write where the vector of each entry begins in a flat gradient whose rows begin `apart` from one another.

    Args:
        offsets: (F * B + 1,), the bags of the first feature, then of the second, ..., from 0 to N; None: each row has
            one entry of each feature, and these are side by side.
        columns: F columns, where the features begin.
        size: B.
        apart: see above.
        out: (N,), int32 or int64, contiguous.

    Example:
        >>> out = torch.empty(3, dtype=torch.int32)
        >>> entry_sources(torch.tensor([0, 2, 2, 3, 3]), [0, 4], 2, 10, out)
        >>> out.tolist()
        [0, 0, 4]
    """
    _check("out", out, (len(out) if offsets is not None else size * len(columns),))
    if offsets is not None:
        _check("offsets", offsets, (len(columns) * size + 1,), (torch.int64,))
    implementation("embedding_bag", out.device).entry_sources(offsets, tuple(columns), size, apart, out)


def _check_call(storage: Tensor, rows: Tensor, out: Tensor, columns: Sequence[int], weights: Tensor | None) -> None:
    check_table(storage)
    for one in (rows, out, weights):
        if one is not None and one.device != storage.device:
            raise VivianeError("rows, weights and output must be beside the table", value=str(one.device))
    if out.dim() != 2 or not has_whole_rows(out):
        raise VivianeError("the output must be a matrix (B, W) of whole rows", value=tuple(out.shape))
    last = out.shape[1] - storage.shape[1]
    if columns and not 0 <= min(columns) <= max(columns) <= last:
        raise VivianeError("a feature does not fit into the output", value=list(columns), allowed=f"0 to {last}")
    if weights is None:
        return
    if weights.shape != rows.shape or weights.dtype != torch.float32 or not weights.is_contiguous():
        value = f"{tuple(weights.shape)} of {weights.dtype}"
        raise VivianeError("weights must be contiguous float32, one per entry", value=value)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = _WHOLE) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise VivianeError(
            f"{name} must be contiguous {shape} of {allowed}", value=f"{tuple(tensor.shape)} of {tensor.dtype}"
        )


def has_whole_rows(matrix: Tensor) -> bool:
    """Whether a matrix's rows are contiguous, one behind the other, with or without something between them.

    Example:
        >>> wide = torch.zeros(2, 6)
        >>> has_whole_rows(wide[:, 1:3]), has_whole_rows(wide[:, ::2]), has_whole_rows(wide[:1].expand(2, 6))
        (True, False, False)
    """
    return matrix.is_contiguous() or (matrix.stride(1) == 1 and matrix.stride(0) > matrix.shape[1])
