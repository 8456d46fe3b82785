"""Triton where it is installed, and stand-ins where it is not, for modules that hold more than GPU kernels.

Modules of kernels alone import triton themselves. A rule of an optimizer has its Triton functions beside those for the
CPU, and must load on systems without Triton, and where TensorFlow was imported before it.
"""

from __future__ import annotations

from typing import Any

from viviane.core.optional import triton_loads

try:
    if not triton_loads():
        raise ImportError("TensorFlow was imported first")
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:
    tl: Any = None  # type: ignore[no-redef]

    def jit(function: Any) -> Any:  # type: ignore[no-redef]
        """Return the function as it is: nothing calls it without Triton."""
        return function


__all__ = ["jit", "tl"]
