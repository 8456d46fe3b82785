"""Rows of a table in Triton's kernels of the update, loaded with their state, moved, stored; and their gradients.

Shapes: T rows at once, D numbers in each.
"""

# Kernels are Python by syntax alone.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.arithmetic import rounded


@triton.jit
def scaled(g, w, scale, scale_at, clip, decay):
    """Return the gradient of rows by scale, a number or on the device, clipping of its norm, and weight decay."""
    if scale is not None:
        g *= scale
    if scale_at is not None:
        g *= tl.load(scale_at).to(tl.float32)
    if clip is not None:
        norm = tl.sqrt_rn(tl.sum(g * g, 1))
        # Not a maximum: NaN stays NaN.
        g *= tl.div_rn(clip, tl.where(norm < clip, clip, norm))[:, None]
    if decay is not None:
        g += decay * w
    return g


@triton.jit
def moved(move: tl.constexpr, inside: tl.constexpr, dim: tl.constexpr, g, parts, numbers, scale, scale_at, clip, decay):
    """Return new rows and state from summed gradients; without a rule the rows are the sums."""
    w, one, two, per_row = parts
    if move is None:
        w = g
    else:
        g = scaled(g, w, scale, scale_at, clip, decay)
        w, one, two, per_row = move(w, g, one, two, per_row, numbers, inside, dim)
    return w, one, two, per_row


@triton.jit
def find_gradients(order, sources, n, stop, dim: tl.constexpr, aligned: tl.constexpr):
    """Return which entries the sorted ones n are, and where their gradients begin; n is one number or several."""
    entry = n.to(tl.int64)
    if order is not None:
        entry = tl.load(order + n, mask=n < stop, other=0).to(tl.int64)
    source = entry * dim
    if sources is not None:
        source = tl.load(sources + entry, mask=n < stop, other=0).to(tl.int64)
    return entry, tl.multiple_of(source, [aligned])


@triton.jit
def load_vectors(base, place, cols, here, dim: tl.constexpr, block: tl.constexpr, hint: tl.constexpr):
    """Load vectors (T, D) as float32. Those left out hold anything; only columns past D are zero, for sums over D."""
    at = base + place[:, None] + cols[None, :]
    if dim == block:
        vectors = tl.load(at, mask=here[:, None], eviction_policy=hint)
    else:
        vectors = tl.load(at, mask=here[:, None] & (cols < dim)[None, :], other=0.0, eviction_policy=hint)
    return vectors.to(tl.float32)


@triton.jit
def load_rows(
    table,
    first,
    second,
    own,
    row,
    cols,
    here,
    move: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
    hint: tl.constexpr,
):
    """Load rows and their state; what a rule lacks is zero."""
    place = tl.multiple_of(row * dim, [vector])
    w = tl.zeros([row.shape[0], block], dtype=tl.float32)
    one, two, per_row = w, w, tl.zeros([row.shape[0]], dtype=tl.float32)
    if move is not None:
        w = load_vectors(table, place, cols, here, dim, block, hint)
    if first is not None:
        one = load_vectors(first, place, cols, here, dim, block, hint)
    if second is not None:
        two = load_vectors(second, place, cols, here, dim, block, hint)
    if own is not None:
        per_row = tl.load(own + row, mask=here, other=0.0)
    return w, one, two, per_row


@triton.jit
def store_rows(
    table,
    first,
    second,
    own,
    touched,
    names,
    w,
    one,
    two,
    per_row,
    row,
    cols,
    here,
    dim: tl.constexpr,
    vector: tl.constexpr,
    dither,
    hint: tl.constexpr,
):
    """Store rows, rounded to their type, and their state.

    Args:
        names: what rounding takes each row for, and what is subtracted from that; None: the row itself.
    """
    place = tl.multiple_of(row * dim, [vector])[:, None] + cols[None, :]
    mask = here[:, None] & (cols < dim)[None, :]
    name = row
    if names is not None:
        name = tl.load(names[0] + row, mask=here, other=0) - names[1]
    tl.store(table + place, rounded(w, table.dtype.element_ty, dither, name, cols), mask=mask, eviction_policy=hint)
    if first is not None:
        tl.store(first + place, one, mask=mask, eviction_policy=hint)
    if second is not None:
        tl.store(second + place, two, mask=mask, eviction_policy=hint)
    if own is not None:
        tl.store(own + row, per_row, mask=here)
    if touched is not None:
        tl.store(touched + row, tl.full([row.shape[0]], 1, tl.int8), mask=here)
