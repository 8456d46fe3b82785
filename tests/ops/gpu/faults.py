"""Kernels that the interpreter runs and the compiler must refuse, for the test of the test."""

import triton
import triton.language as tl


@triton.jit
def changes_a_type_kernel(out, size):
    """Gives a name another type within a branch."""
    n = tl.full([], 0, tl.int64)
    if size > 4:
        n = tl.program_id(0)
    tl.store(out, n)


@triton.jit
def takes_too_much_kernel(source, target):
    """Holds a tile in shared memory that is larger than that."""
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def loads_one_by_one_kernel(table, wide: tl.constexpr, block: tl.constexpr):
    """Says of a number that it is an address of four numbers, which the compiler forgets once it is a pointer."""
    place = tl.multiple_of(tl.load(table), [16])
    n = tl.arange(0, block)
    base = place.to(tl.pointer_type(tl.float32))
    tl.store(base + n, tl.load(base + n) + 1)
