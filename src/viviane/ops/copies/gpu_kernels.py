"""The Triton kernels of copies."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["size"])
def cast_kernel(source, target, size, wide: tl.constexpr, block: tl.constexpr):
    """Copy `block` numbers into another type.

    Wide: eight neighbours are copied together or not at all, so that a thread moves as many bytes as it can; a mask
    that ends anywhere would let it move one number. What is left of a last eight is copied by itself.
    """
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = n // 8 < size // 8 if wide else n < size
    tl.store(target + n, tl.load(source + n, mask=here, other=0.0).to(target.dtype.element_ty), mask=here)
    if wide and size % 8 != 0:
        rest = (n >= size // 8 * 8) & (n < size)
        tl.store(target + n, tl.load(source + n, mask=rest, other=0.0).to(target.dtype.element_ty), mask=rest)


@triton.jit
def copy_kernel(sources, targets, pieces, block: tl.constexpr):
    """Copy one piece of a tensor, in units of four bytes; tensors begin at multiples of 16 bytes."""
    piece = pieces + tl.program_id(0) * 3
    tensor, start, size = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    # Said of the pointers: of the numbers that they were cast from, the compiler forgets it.
    source = tl.multiple_of(tl.load(sources + tensor).to(tl.pointer_type(tl.int32)), [16])
    target = tl.multiple_of(tl.load(targets + tensor).to(tl.pointer_type(tl.int32)), [16])
    n = tl.multiple_of(start, [16]) + tl.arange(0, block)
    here = n // 4 < size // 4
    tl.store(target + n, tl.load(source + n, mask=here, other=0), mask=here)
    rest = (n >= size // 4 * 4) & (n < size)  # what is left of a last group of four
    tl.store(target + n, tl.load(source + n, mask=rest, other=0), mask=rest)
