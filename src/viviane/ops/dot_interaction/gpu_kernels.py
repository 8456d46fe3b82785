"""The Triton kernels of the dot interaction.

A program holds `samples` samples, each in `block` rows: row r is vector r % block of sample r // block. The product of
all its rows with one another holds every sample's dot products in a square on its diagonal; the rest of it is unused,
which costs less than many small products would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from viviane.ops.triton_parts.arithmetic import report_largest


@triton.jit
def _starts_of(rows, b, j, here, vectors: tl.constexpr, dim: tl.constexpr):
    """Return where vector j of sample b begins: in (B, vectors, dim), or in the table whose rows are numbered."""
    place = b.to(tl.int64) * vectors + j
    if rows is not None:
        place = tl.load(rows + place, mask=here, other=0).to(tl.int64)
    return place * dim


@triton.jit
def load_vectors(
    dense,
    embeddings,
    rows,
    b,
    i,
    inside,
    start,
    s: tl.constexpr,
    dim: tl.constexpr,
    columns: tl.constexpr,
    kind: tl.constexpr,
):
    """Load columns [start, start + columns) of vector i of sample b, for each row; zeros outside.

    Embeddings are (B, s, dim); or a table (N, dim) and the numbers of its rows (B, s), which others read again soon.
    """
    keep: tl.constexpr = "" if rows is None else "evict_last"
    cols = start + tl.arange(0, columns)
    here = inside[:, None] & (cols < dim)[None, :]
    if dense is None:
        place = _starts_of(rows, b, i, inside, s, dim)
        z = tl.load(embeddings + place[:, None] + cols[None, :], mask=here, other=0.0, eviction_policy=keep).to(kind)
    else:
        looked_up = inside & (i > 0)
        place = _starts_of(rows, b, i - 1, looked_up, s - 1, dim)
        own = here & looked_up[:, None]
        z = tl.load(embeddings + place[:, None] + cols[None, :], mask=own, other=0.0, eviction_policy=keep).to(kind)
        place = b.to(tl.int64) * dim
        d = tl.load(dense + place[:, None] + cols[None, :], mask=here & (i == 0)[:, None], other=0.0).to(kind)
        z = tl.where((i == 0)[:, None], d, z)
    return z


@triton.jit
def pair_places(b_row, i_row, b_col, i_col, width, front: tl.constexpr, itself: tl.constexpr):
    """Return where the output holds the pair of two rows of one sample."""
    high = tl.maximum(i_row[:, None], i_col[None, :])
    low = tl.minimum(i_row[:, None], i_col[None, :])
    first = high * (high + 1) // 2 if itself else high * (high - 1) // 2
    return (b_row.to(tl.int64) * width + front)[:, None] + (first + low)


@triton.jit(do_not_specialize=["size"])
def interaction_forward_kernel(
    dense,
    embeddings,
    rows,
    out,
    size,
    width,
    s: tl.constexpr,
    dim: tl.constexpr,
    front: tl.constexpr,
    pad: tl.constexpr,
    itself: tl.constexpr,
    kind: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
    samples: tl.constexpr,
    columns: tl.constexpr,
):
    """Write the outputs of `samples` samples; for `rows` see `load_vectors`."""
    lanes: tl.constexpr = block * samples
    # A product has at least 16 rows.
    height: tl.constexpr = lanes if lanes >= 16 else 16
    r = tl.arange(0, height)
    b = tl.program_id(0) * samples + r // block
    i = r % block
    inside = (b < size) & (i < s) & (r < lanes)
    dots = tl.zeros([height, height], dtype=tl.float32)
    for start in tl.static_range(0, dim, columns):
        z = load_vectors(dense, embeddings, rows, b, i, inside, start, s, dim, columns, kind)
        dots = tl.dot(z, tl.trans(z), dots, input_precision=precision)
    pairs = (i[:, None] >= i[None, :]) if itself else (i[:, None] > i[None, :])
    mask = pairs & (r[:, None] // block == r[None, :] // block) & inside[:, None]
    place = pair_places(b, i, b, i, width, front, itself)
    tl.store(out + place, dots.to(out.dtype.element_ty), mask=mask)
    first = inside & (i == 0)
    if pad:
        tl.store(out + b.to(tl.int64) * width + (width - 1), tl.zeros([height], dtype=out.dtype.element_ty), mask=first)
    if dense is not None:
        n = tl.program_id(0) * samples + tl.arange(0, samples)
        for start in tl.static_range(0, dim, columns):
            cols = start + tl.arange(0, columns)
            here = (n < size)[:, None] & (cols < dim)[None, :]
            vector = tl.load(dense + (n.to(tl.int64) * dim)[:, None] + cols[None, :], mask=here, other=0.0)
            tl.store(out + (n.to(tl.int64) * width)[:, None] + cols[None, :], vector, mask=here)


@triton.jit(do_not_specialize=["size"])
def interaction_backward_kernel(
    grad,
    dense,
    embeddings,
    grad_embeddings,
    grad_dense,
    status,
    size,
    width,
    s: tl.constexpr,
    dim: tl.constexpr,
    front: tl.constexpr,
    itself: tl.constexpr,
    kind: tl.constexpr,
    precision: tl.constexpr,
    block: tl.constexpr,
    samples: tl.constexpr,
    columns: tl.constexpr,
):
    """dz = (G + G^T) z for `samples` samples, and the dense vector's own gradient; NaN and infinity set the status."""
    lanes: tl.constexpr = block * samples
    rows: tl.constexpr = lanes if lanes >= 16 else 16
    r = tl.arange(0, rows)
    b = tl.program_id(0) * samples + r // block
    i = r % block
    inside = (b < size) & (i < s) & (r < lanes)
    same = (r[:, None] // block == r[None, :] // block) & inside[:, None] & inside[None, :]
    if not itself:
        same = same & (i[:, None] != i[None, :])
    g = tl.load(grad + pair_places(b, i, b, i, width, front, itself), mask=same, other=0.0)
    if itself:
        g = tl.where(i[:, None] == i[None, :], g * 2, g)
    g = g.to(kind)
    for start in tl.static_range(0, dim, columns):
        z = load_vectors(dense, embeddings, None, b, i, inside, start, s, dim, columns, kind)
        dz = tl.dot(g, z, input_precision=precision)
        cols = start + tl.arange(0, columns)
        here = inside[:, None] & (cols < dim)[None, :]
        if dense is None:
            place = (b.to(tl.int64) * s + i) * dim
            value = dz.to(grad_embeddings.dtype.element_ty)
            tl.store(grad_embeddings + place[:, None] + cols[None, :], value, mask=here)
        else:
            first = here & (i == 0)[:, None]
            own = tl.load(grad + (b.to(tl.int64) * width)[:, None] + cols[None, :], mask=first, other=0.0)
            dz += own.to(tl.float32)
            value = dz.to(grad_dense.dtype.element_ty)
            tl.store(grad_dense + (b.to(tl.int64) * dim)[:, None] + cols[None, :], value, mask=first)
            place = (b.to(tl.int64) * (s - 1) + (i - 1)) * dim
            value = dz.to(grad_embeddings.dtype.element_ty)
            tl.store(grad_embeddings + place[:, None] + cols[None, :], value, mask=here & (i > 0)[:, None])
        if status is not None:
            report_largest(value, status)  # where nothing is stored there are zeros, or products with what is bad
