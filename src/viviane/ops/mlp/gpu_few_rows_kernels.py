"""The Triton kernel of fully connected layers of a few rows."""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

_WORDS: tl.constexpr = tl.constexpr(6)


@triton.jit(do_not_specialize=["size", "width", "count"])
def few_rows_kernel(
    x,
    packed,
    layers,
    between,
    out,
    arrivals,
    size,
    width,
    count,
    widest: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """out = act(... act(x W_1^T + b_1) ... W_L^T + b_L) for `size` rows; all programs run at once.

    x (B, width); packed weights and biases; layers (L, 6), L at least 2; between (2, rows, widest), where the programs
    leave the activations for one another; out (B, n_L).
    """
    _layer(x, width, wide, packed, layers, between, widest, True, size, rows, columns, step, stages)
    last = count - 1
    for i in range(1, last):
        _meet(arrivals)
        source, target = between + (1 - i % 2) * rows * widest, between + (i % 2) * rows * widest
        row = layers + i * _WORDS
        _layer(source, widest, True, packed, row, target, widest, True, size, rows, columns, step, stages)
    _meet(arrivals)
    row = layers + last * _WORDS
    source = between + (1 - last % 2) * rows * widest
    _layer(source, widest, True, packed, row, out, tl.load(row + 4), False, size, rows, columns, step, stages)


@triton.jit
def _layer(
    x,
    x_width,
    wide: tl.constexpr,
    packed,
    layer,
    out,
    out_width,
    pad: tl.constexpr,
    size,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
):
    """Compute this program's columns of a layer; with `pad` columns past the last are zeros, up to a multiple of 8."""
    weight = tl.multiple_of(packed + tl.load(layer), [16])
    bias = packed + tl.load(layer + 1)
    k, w_width, n, relu = tl.load(layer + 2), tl.load(layer + 3), tl.load(layer + 4), tl.load(layer + 5)
    r = tl.arange(0, rows)
    for tile in range(tl.program_id(0), tl.cdiv(n, columns), tl.num_programs(0)):
        c = tile * columns + tl.arange(0, columns)
        total = tl.zeros([rows, columns], dtype=tl.float32)
        for first in tl.range(0, w_width, step, num_stages=stages):
            i = first + tl.arange(0, step)
            inside = i // 8 < w_width // 8
            # Multiples of 8, which a mask and a product would hide.
            w_start = tl.multiple_of(c * w_width, [8])
            w = tl.load(weight + w_start[None, :] + i[:, None], mask=inside[:, None] & (c < n)[None, :], other=0.0)
            if wide:
                x_start = tl.multiple_of(r * x_width, [8])
                there = inside[None, :] & (r < size)[:, None]
                h = tl.load(x + x_start[:, None] + i[None, :], mask=there, other=0.0, cache_modifier=".cg")
            else:
                there = (i < k)[None, :] & (r < size)[:, None]
                h = tl.load(x + (r * x_width)[:, None] + i[None, :], mask=there, other=0.0)
            total = tl.dot(h.to(w.dtype), w, total)
        y = total + tl.load(bias + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
        y = tl.where(relu != 0, tl.maximum(y, 0.0), y).to(out.dtype.element_ty)
        kept = c < (n + 7) // 8 * 8 if pad else c < n
        tl.store(out + (r * out_width)[:, None] + c[None, :], y, mask=(r < size)[:, None] & kept[None, :])


@triton.jit
def _meet(arrivals):
    """Grid barrier: wait until all programs arrive. The counter continues from launch to launch."""
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    goal = (arrived // tl.num_programs(0) + 1) * tl.num_programs(0)
    while arrived < goal:
        arrived = tl.atomic_add(arrivals, 0, sem="acq_rel")
    tl.debug_barrier()
