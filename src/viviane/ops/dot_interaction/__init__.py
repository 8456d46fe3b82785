"""DLRM's dot interaction: the dense vector, then the dot products of all pairs of vectors.

Shapes: B samples, S vectors a sample, D their width, P pairs. With z = [dense, e_1 ... e_s] (or the embeddings alone)

    out[b] = dense[b], z_i . z_j for i > j, row by row, and a zero if `pad`          (B, [D +] P [+ 1])

P = S (S - 1) / 2; with `itself` the diagonal belongs to the triangle: i >= j, P = S (S + 1) / 2.

On a GPU one kernel reads the vectors once and writes the output once, and so does the backward; on the CPU, too, for
float32. Elsewhere plain torch is used, with the same results up to rounding; `reason` says why no GPU's kernel does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from viviane.core.errors import SchemaError
from viviane.ops.dispatch import choose, kernels_serve, load
from viviane.ops.dot_interaction.operator import dot_interaction_kernel
from viviane.ops.dot_interaction.reference import dot_interaction as plain
from viviane.ops.dot_interaction.reference import num_pairs
from viviane.ops.embedding_bag import gather_rows

__all__ = ["TableRows", "dot_interaction", "num_pairs", "reason"]

MAX_VECTORS = 128
_MOST_NUMBERS = 8192
"""On the CPU, of a sample's vectors, and of its matrix of products: what its first cache and a stack hold."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TableRows(NamedTuple):
    """Vectors (B, s, D) given by the rows of a table that hold them, for a forward pass that needs no gradient.

    Args:
        table: (N, D), contiguous.
        rows: (B, s), int32 or int64; each is less than N, which the caller has checked.
        dtype: of a lookup of these rows.

    Example:
        >>> TableRows(torch.eye(3), torch.tensor([[2, 0]]), torch.float32).vectors().tolist()
        [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
    """

    table: Tensor
    rows: Tensor
    dtype: torch.dtype

    def vectors(self) -> Tensor:
        """Look the rows up."""
        (size, s), dim = self.rows.shape, self.table.shape[1]
        out = self.table.new_empty(size, s * dim, dtype=self.dtype)
        gather_rows(self.table, self.rows.contiguous(), out, range(0, s * dim, dim))
        return out.view(size, s, dim)


def dot_interaction(
    dense: Tensor | None, embeddings: Tensor | TableRows, *, pad: bool = True, itself: bool = False
) -> Tensor:
    """Return the dense vector and the dot products of all pairs, in the first input's dtype.

    Products are of that dtype, or of autocast's where it is on; sums are float32. float32 products follow
    `torch.set_float32_matmul_precision`.

    Args:
        dense: (B, D), or None.
        embeddings: (B, s, D), which may be of another dtype; or the rows of a table. A GPU reads those once, without
            writing the vectors in between, and gives the same bits.
        pad: append a column of zeros, as HugeCTR does to keep the width even.
        itself: take z_i . z_i too.

    Raises:
        SchemaError: shapes that do not fit.

    Example:
        >>> dot_interaction(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0]]])).tolist()
        [[1.0, 2.0, 11.0, 0.0]]
    """
    if isinstance(embeddings, TableRows):
        return _of_rows(dense, embeddings, pad, itself)
    fits = embeddings.dim() == 3
    if dense is not None:
        fits = fits and tuple(dense.shape) == (embeddings.shape[0], embeddings.shape[2])
    if not fits:
        given = "none" if dense is None else tuple(dense.shape)
        raise SchemaError(
            "the dot interaction takes dense (B, D) and embeddings (B, s, D)",
            value=f"{given}, {tuple(embeddings.shape)}",
        )
    if _fits_cpu(dense, embeddings):
        dots: Tensor = load("dot_interaction", "cpu").dot_interaction(dense, embeddings, pad, itself)
        return dots
    if reason(dense, embeddings) is not None:
        return plain(dense, embeddings, pad, itself)
    dtype = _product_dtype(embeddings.device, (embeddings if dense is None else dense).dtype)
    return dot_interaction_kernel(dense, embeddings, pad, itself, dtype)


def _of_rows(dense: Tensor | None, embeddings: TableRows, pad: bool, itself: bool) -> Tensor:
    table, rows, out_dtype = embeddings
    dtype = _product_dtype(table.device, out_dtype if dense is None else dense.dtype)
    # Otherwise a lookup would round to a third type.
    rounds_once = out_dtype in (dtype, torch.float32)
    needs_gradient = dense is not None and dense.requires_grad and torch.is_grad_enabled()
    fits = rows.numel() > 0 and (dense is None or tuple(dense.shape) == (rows.shape[0], table.shape[1]))
    a_sample = table[:1].expand(rows.shape[1], -1)[None]
    if not rounds_once or needs_gradient or not fits or reason(dense, a_sample) is not None:
        return dot_interaction(dense, embeddings.vectors(), pad=pad, itself=itself)
    first = out_dtype if dense is None else dense.dtype
    found: Tensor = load("dot_interaction", "gpu").forward_of_rows(dense, table, rows, first, pad, itself, dtype)
    return found


def reason(dense: Tensor | None, embeddings: Tensor) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the fused kernel does.

    Example:
        >>> reason(None, torch.ones(1, 2, 3))
        'no GPU, or VIVIANE_OPS: plain torch'
    """
    if not kernels_serve(embeddings.device):
        return "no GPU, or VIVIANE_OPS: plain torch"
    given = [embeddings] if dense is None else [dense, embeddings]
    if any(one.dtype not in _TYPES for one in given):
        return "only float32, bfloat16 and float16 have a kernel"
    if embeddings.shape[1] + len(given) - 1 > MAX_VECTORS:
        return f"more than {MAX_VECTORS} vectors do not fit into one program's registers"
    if not embeddings.numel():
        return "nothing to compute"
    return None


def _fits_cpu(dense: Tensor | None, embeddings: Tensor) -> bool:
    """Whether the CPU's kernel serves: float32, few enough vectors, and no tracing."""
    if embeddings.device.type != "cpu" or kernels_serve(embeddings.device) or torch.compiler.is_compiling():
        return False
    if choose(embeddings.device) == "reference" or torch._C._get_tracing_state() is not None:
        return False
    given = [embeddings] if dense is None else [dense, embeddings]
    s, dim = embeddings.shape[1] + len(given) - 1, embeddings.shape[2]
    fits = max(s * s, (s + 7) * dim) <= _MOST_NUMBERS and embeddings.numel() > 0
    return fits and not torch.is_autocast_enabled("cpu") and all(one.dtype == torch.float32 for one in given)


def _product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
