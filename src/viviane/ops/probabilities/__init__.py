"""Probabilities of logits: p = 1 / (1 + e^(s - z)), float32.

On a GPU one kernel widens 16-bit logits, computes them, and writes them where the caller wants them, into page-locked
memory of the host too; torch needs three launches for it, which are a tenth of a small batch's time. On the CPU it is
rounded once. Both may differ from torch's sigmoid in the last bit, so that all who predict take them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viviane.ops.dispatch import choose, kernels_serve, load
from viviane.ops.probabilities.reference import write_probabilities as plain

__all__ = ["probabilities", "reason", "write_probabilities"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def probabilities(logits: Tensor, shift: float = 0.0) -> Tensor:
    """Return probabilities in the shape of the logits, float32.

    Args:
        logits: of any shape.
        shift: s above.

    Example:
        >>> probabilities(torch.tensor([0.0, 100.0])).tolist()
        [0.5, 1.0]
    """
    if reason(logits) is not None:
        return ((logits.float() - shift) if shift else logits.float()).sigmoid()
    if logits.device.type == "cpu" and not kernels_serve(logits.device):
        found: Tensor = load("probabilities", "cpu").probabilities(logits, shift)
        return found
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    write_probabilities(logits, out, shift)
    return out


def write_probabilities(
    logits: Tensor, out: Tensor, shift: float = 0.0, records: Sequence[Tensor] = (), flag: Tensor | None = None
) -> None:
    """Write probabilities, and into `flag` whether a record is set, by one launch that a CUDA graph can repeat.

    Args:
        logits: of any shape.
        out: float32, contiguous, of that shape; may be the host's memory, as a tensor of the GPU.
        shift: s above.
        records: int64; a record is set if its first number is not 0.
        flag: (1,), int64; None if it is not needed.

    Example:
        >>> out, flag = torch.empty(1), torch.zeros(1, dtype=torch.int64)
        >>> write_probabilities(torch.zeros(1), out, records=[torch.tensor([7])], flag=flag)
        >>> out.item(), bool(flag)
        (0.5, True)
    """
    if reason(logits) is not None or not kernels_serve(out.device):
        plain(logits, out, shift, records, flag)
    else:
        load("probabilities", "gpu").write_probabilities(logits, out, shift, records, flag)


def reason(logits: Tensor) -> str | None:
    """Return the reason why plain torch is used for these logits, or None if the kernel does.

    Example:
        >>> reason(torch.ones(1, dtype=torch.float64))
        'only float32, bfloat16 and float16 have a kernel'
    """
    if choose(logits.device) == "reference":
        return "VIVIANE_OPS: plain torch"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "a trace reads plain torch"
    if logits.dtype not in _TYPES:
        return "only float32, bfloat16 and float16 have a kernel"
    if logits.requires_grad and torch.is_grad_enabled():
        return "the kernel has no gradient"
    if not logits.numel():
        return "nothing to compute"
    return None
