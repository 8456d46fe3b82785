"""The normaliser of a softmax over candidates, and its gradients, without the matrix of scores.

    z_bj = u_b . v_j - c_j                      minus infinity where candidate j is the row's own item
    L_b  = log(exp o_b + sum over j of exp z_bj)
    du_b = g_b sum over j of p_bj v_j           p_bj = exp(z_bj - L_b)
    dv_j = sum over b of g_b p_bj u_b

Shapes: B rows, C candidates, d the width. u (B, d), v (C, d), c (C,), o and ids (B,), the candidates' ids (C,); rows
whose `counts` is 0 are left out: their L is o, their gradients are 0.

These are the kernels; `viviane.nn.candidates` is the function with its gradient, and what serves where they do not.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from viviane.ops.dispatch import kernels_serve, load

__all__ = ["backward", "forward", "reason", "rows_first"]

_MOST_WIDTH = 256  # numbers of a vector: tiles of both sides have to fit into shared memory


def reason(u: Tensor, v: Tensor) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the kernel does.

    Example:
        >>> reason(torch.ones(1, 1), torch.ones(1, 1))
        'no GPU, or VIVIANE_OPS: plain torch'
    """
    if not kernels_serve(u.device):
        return "no GPU, or VIVIANE_OPS: plain torch"
    if u.dtype != torch.float32 or v.dtype != torch.float32:
        return "only float32 has a kernel"
    if u.shape[1] > _MOST_WIDTH:
        return f"a vector of more than {_MOST_WIDTH} numbers does not fit into shared memory"
    if not len(u) or not len(v):
        return "nothing to compute"
    return None


def rows_first(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with those that count in front, in their order, (B,), and how many do, (1,).

    Example:
        >>> rows_first(torch.tensor([False, True, True]))
        (tensor([1, 2, 0]), tensor([2]))
    """
    order = torch.sort((~counts).to(torch.uint8), stable=True).indices
    return order, counts.sum().view(1)


def forward(
    u: Tensor, v: Tensor, correction: Tensor, own: Tensor, ids: Tensor, of: Tensor, order: Tensor, count: Tensor
) -> Tensor:
    """Return L, (B,); `order` and `count` as of `rows_first`."""
    return cast(Tensor, load("candidate_sums", "gpu").forward(u, v, correction, own, ids, of, order, count))


def backward(
    u: Tensor, v: Tensor, correction: Tensor, sums: Tensor, ids: Tensor, of: Tensor, order: Tensor, count: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return du and dv; `sums` is L, `grad` is g, (B,)."""
    kernels = load("candidate_sums", "gpu")
    return cast(
        tuple[Tensor, Tensor], kernels.backward(u, v, correction, sums, ids, of, order, count, grad)
    )  # fmt: skip
