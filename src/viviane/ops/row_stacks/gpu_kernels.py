"""The Triton kernel of stacks of rows."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "first", "target_rows", "source_rows"])
def take_rows_kernel(
    target, source, order, table, count, first, target_rows, source_rows, rows: tl.constexpr, block: tl.constexpr
):
    """Take `rows` rows of one matrix, word by word in the order of the target: its memory is written in one go."""
    matrix = tl.program_id(1)
    width, before = tl.load(table + 2 * matrix), tl.load(table + 2 * matrix + 1)
    start = tl.program_id(0) * rows
    there = target + before * target_rows + (first + start).to(tl.int64) * width
    here = source + before * source_rows
    narrow = width.to(tl.int32)  # a division of 32 bits takes a fraction of one of 64
    words = tl.minimum(rows, count - start) * narrow
    for piece in range(0, words, block):
        word = piece + tl.arange(0, block)
        inside = word < words
        row = word // narrow
        taken = tl.load(order + start + row, mask=inside, other=0).to(tl.int64)
        value = tl.load(here + taken * width + (word - row * narrow), mask=inside)
        tl.store(there + word, value, mask=inside)
