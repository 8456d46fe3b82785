"""The Triton kernels of the control_block: addresses of the host's page-locked memory are the device's, too."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "num_rows", "width"])
def read_row_kernel(rows, count, words, num_rows, width, block: tl.constexpr):
    """Read words of a row, past all caches: the host writes to it between two replays."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    here = n < width
    row = tl.cast(rows, tl.int64).to(tl.pointer_type(tl.int64)) + tl.load(count) % num_rows * width
    tl.store(words + n, tl.load(row + n, mask=here, other=0, cache_modifier=".cv"), mask=here)


@triton.jit(do_not_specialize=["rows", "num_rows", "width"])
def write_back_kernel(words, loss, held, rows, count, signal, num_rows, width, block: tl.constexpr):
    """Write the loss to its address, and what the step held to its row, with a signal behind it."""
    tl.store(tl.load(words).to(tl.pointer_type(loss.dtype.element_ty)), tl.load(loss))
    n = tl.arange(0, block)
    here = n < width
    row = tl.cast(rows, tl.int64).to(tl.pointer_type(tl.int64)) + (tl.load(count) - 1) % num_rows * (width + 1)
    tl.store(row + n, tl.load(held + n, mask=here, other=0), mask=here)
    if signal is not None:
        tl.store(row + width, tl.load(signal).to(tl.int64))
