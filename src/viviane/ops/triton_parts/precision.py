"""Triton's names of torch's number types, and how exact a float32 product shall be."""

from __future__ import annotations

import torch
import triton.language as tl

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def dot_precision() -> str:
    """Return how float32 products are made: as `torch.set_float32_matmul_precision` says.

    Example:
        >>> dot_precision()
        'ieee'
    """
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
