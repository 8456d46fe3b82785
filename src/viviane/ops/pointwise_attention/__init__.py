"""Causal attention whose weights are SiLU of the scores, not a softmax, with biases by place and by time.

    z_ij = q_i . k_j + p[i - j] + r[bucket(t_i - t_j)]
    y_i  = (1 / L) sum over j <= i that hold an event of silu(z_ij) v_j          silu(z) = z sigmoid(z)

    bucket(t) = min(floor(log2(1 + max(t, 0) // unit)), K - 1)

Shapes: B rows, L places, H heads, d and e the widths of a head's keys and values. q, k (B, L, H, d); v (B, L, H, e);
p (L,); r (K,); t (B, L), int64. Heads share the biases. A pair with an unknown time has no time bias.

On a GPU the (B, H, L, L) weights never reach memory: forward and backward work on tiles of them (`gpu.py`).

Source: Zhai et al. 2024, "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (HSTU), whose released code divides by the longest length as done here.
"""

from __future__ import annotations

from torch import Tensor

from viviane.ops.dispatch import kernels_serve
from viviane.ops.pointwise_attention.operator import attend
from viviane.ops.pointwise_attention.reference import UNKNOWN_TIME, time_buckets
from viviane.ops.pointwise_attention.reference import pointwise_attention as plain

__all__ = ["UNKNOWN_TIME", "pointwise_attention", "reason", "time_buckets"]

_MOST_WIDTH = 256  # numbers of a head: a tile of queries, keys and values has to fit into shared memory


def pointwise_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    position: Tensor | None = None,
    times: Tensor | None = None,
    time_bias: Tensor | None = None,
    unit: int = 1,
) -> Tensor:
    """Return y, (B, L, H, e), in v's type.

    Args:
        q, k, v: see above; float32, bfloat16 or float16 (float64 on plain torch).
        held: (B, L), bool: which places hold an event. Empty places are no keys; what they return means nothing.
        position: p, or None.
        times, time_bias: t and r, both or neither; `UNKNOWN_TIME` marks an unknown time.
        unit: time that counts as one.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 2, 1, 1)
        >>> y = pointwise_attention(one, one, one, torch.tensor([[True, True]]))
        >>> [round(x, 4) for x in y.flatten().tolist()]  # silu(1) / 2 and 2 silu(1) / 2
        [0.3655, 0.7311]
    """
    if reason(q, v) is not None:
        return plain(q, k, v, held, position, times, time_bias, unit)
    return attend(q, k, v, held, position, times, time_bias, unit)


def reason(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why plain torch is used for these inputs, or None if the kernel does.

    Example:
        >>> import torch
        >>> reason(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
        'no GPU, or VIVIANE_OPS: plain torch'
    """
    if not kernels_serve(q.device):
        return "no GPU, or VIVIANE_OPS: plain torch"
    if q.dtype.itemsize > 4:
        return "float64 has no kernel"
    if max(q.shape[-1], v.shape[-1]) > _MOST_WIDTH:
        return f"a head of more than {_MOST_WIDTH} numbers does not fit into shared memory"
    if not q.numel() or not v.numel():
        return "nothing to compute"
    return None
