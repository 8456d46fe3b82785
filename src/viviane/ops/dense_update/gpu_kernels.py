"""The Triton kernels of the dense update."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.arithmetic import is_bad, report_bad


@triton.jit
def _at(
    table,
    tensor,
    column: tl.constexpr,
    columns: tl.constexpr,
    wide: tl.constexpr,
    given: tl.constexpr = tl.float32,
):
    """Return the address of a tensor."""
    base = tl.load(table + tensor * columns + column).to(tl.pointer_type(given))
    if wide:  # four numbers, of 16 bits too: programs then hold all columns alike, and exchange nothing
        # Said of the pointer: of the number that it was cast from, the compiler forgets it, and loads one by one.
        base = tl.multiple_of(base, [given.primitive_bitwidth // 2])
    return base


@triton.jit
def _move_block(
    n, here, table, tensor, numbers, scale, move: tl.constexpr, inside: tl.constexpr, decays: tl.constexpr,
    columns: tl.constexpr, wide: tl.constexpr, given: tl.constexpr,
):  # fmt: skip
    w_at = _at(table, tensor, 0, columns, wide) + n
    w = tl.load(w_at, mask=here, other=0.0)
    g = tl.load(_at(table, tensor, 1, columns, wide, given) + n, mask=here, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    if decays:
        g += tl.load(numbers + 1).to(tl.float32) * w
    first, second = w, w  # what a rule lacks is never read
    if columns > 2:
        first_at = _at(table, tensor, 2, columns, wide) + n
        first = tl.load(first_at, mask=here, other=0.0)
    if columns > 3:
        second_at = _at(table, tensor, 3, columns, wide) + n
        second = tl.load(second_at, mask=here, other=0.0)
    w, first, second = move(w, g, first, second, numbers, inside)
    if columns > 3:
        tl.store(second_at, second, mask=here)
    if columns > 2:
        tl.store(first_at, first, mask=here)
    tl.store(w_at, w, mask=here)


@triton.jit
def move_kernel(
    table,
    pieces,
    numbers,
    scale,
    gate,
    move: tl.constexpr,
    inside: tl.constexpr,
    decays: tl.constexpr,
    columns: tl.constexpr,
    wide: tl.constexpr,
    given: tl.constexpr,
    block: tl.constexpr,
):
    """Move one piece of a tensor; the arithmetic is the rule's `gpu_dense`.

    Where addresses allow it, four neighbours are moved together or not at all: a mask that ends anywhere would let a
    thread load one number. What is left of a tensor's last four is moved by itself.
    """
    piece = pieces + tl.program_id(0) * 3
    tensor, start, size = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    if gate is not None:
        size *= tl.load(gate)
    n = tl.multiple_of(start, [16]) + tl.arange(0, block)
    here = n // 4 < size // 4 if wide else n < size
    _move_block(n, here, table, tensor, numbers, scale, move, inside, decays, columns, wide, given)
    if wide and (size % 4 != 0) & (start + block >= size):
        rest = (n >= size // 4 * 4) & (n < size)
        _move_block(n, rest, table, tensor, numbers, scale, move, inside, decays, columns, wide, given)


@triton.jit(do_not_specialize=["size"])
def check_kernel(
    tensors,
    pieces,
    size,
    status,
    wide: tl.constexpr,
    given: tl.constexpr,
    block: tl.constexpr,
    turns: tl.constexpr,
):
    """Set status[0] where a number is NaN or infinite: of one tensor, or of a piece of one out of a table."""
    if pieces is not None:
        piece = pieces + tl.program_id(0) * 3
        start, size = tl.load(piece + 1), tl.load(piece + 2)
        base = _at(tensors, tl.load(piece), 0, 1, wide, given)
    else:
        start = tl.program_id(0).to(tl.int64) * (block * turns)
        base = tensors
    bad = tl.zeros([block], dtype=tl.int32)
    for turn in tl.static_range(turns):
        n = tl.multiple_of(start, [16]) + turn * block + tl.arange(0, block)
        here = n // 4 < size // 4 if wide else n < size
        x = tl.load(base + n, mask=here, other=0.0).to(tl.float32)
        bad |= is_bad(x).to(tl.int32)
    if wide and (size % 4 != 0) & (start + block * turns >= size):  # what is left of the last four
        rest = size // 4 * 4 + tl.arange(0, block)
        y = tl.load(base + rest, mask=(rest < size) & (rest >= start), other=0.0).to(tl.float32)
        bad |= is_bad(y).to(tl.int32)
    report_bad(bad, status)


@triton.jit(do_not_specialize=["size"])
def check_columns_kernel(
    base,
    size,
    width,
    apart,
    status,
    aligned: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Do so for a matrix (size, width) whose rows begin `apart` from one another: `rows` of them."""
    r = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    at = base + tl.multiple_of(r * apart, [aligned])[:, None]
    bad = tl.zeros([rows, block], dtype=tl.int32)
    for start in range(0, width, block):
        n = tl.multiple_of(start, [16]) + tl.arange(0, block)
        x = tl.load(at + n[None, :], mask=(r < size)[:, None] & (n < width)[None, :], other=0.0).to(tl.float32)
        bad |= is_bad(x).to(tl.int32)
    report_bad(tl.max(bad, 0), status)


@triton.jit
def mark_kernel(records, status):
    """Set status[0] where the first number of one of the records is not 0."""
    found = tl.load(records[0])
    for i in tl.static_range(1, len(records)):
        found |= tl.load(records[i])
    if found != 0:
        tl.store(status, tl.full([], 1, tl.int64))


@triton.jit
def update_status_kernel(loss, status, gate):
    """Decide whether a step may move weights, and count it."""
    bad = tl.load(status) != 0
    if loss is not None:
        x = tl.load(loss).to(tl.float32)
        bad = bad | is_bad(x)
    _count_step(bad, status)
    tl.store(gate, 1 - bad.to(tl.int32))


@triton.jit
def _count_step(bad, status):
    first, count = tl.load(status + 1), tl.load(status + 2)
    tl.store(status, bad.to(tl.int64))
    tl.store(status + 1, tl.where(bad & (first < 0), count, first))
    tl.store(status + 2, count + 1)


@triton.jit
def update_scaled_status_kernel(loss, status, overflow, scaling, gate, interval, largest):
    """Decide so under a loss scale that follows overflows."""
    overflowed = tl.load(overflow) != 0
    scale, good, skipped = tl.load(scaling), tl.load(scaling + 1), tl.load(scaling + 2)
    x = tl.load(loss).to(tl.float32)
    bad = (tl.load(status) != 0) | is_bad(x) | (overflowed & (scale <= 1))
    good = tl.where(overflowed, 0.0, good + 1)
    doubles = (good >= interval) & (scale < largest)  # never after an overflow: an interval is at least 1
    changed = tl.where(overflowed, scale * 0.5, tl.where(doubles, scale * 2, scale))
    fine = bad == 0
    tl.store(scaling, changed, mask=fine)
    tl.store(scaling + 1, tl.where(doubles, 0.0, good), mask=fine)
    tl.store(scaling + 2, tl.where(overflowed, skipped + 1, skipped), mask=fine)
    tl.store(overflow, tl.full([], 0, tl.int64))
    _count_step(bad, status)
    tl.store(gate, (fine & (overflowed == 0)).to(tl.int32))
