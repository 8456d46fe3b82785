"""A forward pass on the CPU as one call: a list of kernels that runs without Python between them.

A step is a kernel of `viviane.ops.native` and its operands, `call`, whose addresses are settled in advance. `linear`
calls the matrix product that torch itself calls, with the same arguments, and so gives the bits of `torch.addmm`.
"""

from __future__ import annotations

from functools import cache

import torch

from viviane.ops.dispatch import choose

__all__ = ["reason"]


@cache
def reason() -> str | None:
    """Return the reason why programs do not run here, or None.

    Example:
        >>> reason() is None or isinstance(reason(), str)
        True
    """
    if choose(torch.device("cpu")) != "cpu":
        return "kernels for CPUs are switched off"
    from viviane.ops.programs.cpu import sgemm_address

    if not sgemm_address():
        return "torch's library exports no matrix product of the BLAS interface"
    return None
