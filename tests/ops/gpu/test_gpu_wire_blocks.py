"""Blocks for the wire on a GPU against plain loops in float64."""

import math

import pytest
import torch

from viviane.core.errors import VivianeError
from viviane.ops.wire_blocks import Columns, PooledPiece, Segment, Segments, Source, gpu, reference, sum_pieces

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 3, 200, 4100 if torch.cuda.is_available() else 203])
def test_pack_rows(device, dtype, size):
    rng = torch.Generator().manual_seed(size)
    edge = 2**31 - 1 if dtype == torch.int32 else 2**40
    rows = torch.randint(0, 50, (size, 7), generator=rng).to(dtype)
    if size > 1:
        rows[0, 2], rows[1, 2] = 0, edge
    lines, start = [], 0
    for k in range(70):  # more columns than a tile
        width = 1 + k % 3  # blocks of one, two and three columns, the others of which stay
        lines.append([k % 7, start, width, k % 5, [51, 20, edge][k % 3], 1 + k % 4, k % (1 + k % 4), 100 * k, 9999])
        start += max(1, width * size)
    out = torch.full((start,), -7, dtype=dtype, device=device)
    truth = out.cpu().clone()
    gpu.pack_rows(rows.to(device), Columns(lines, device), out)
    for source, first, width, low, high, stride, offset, base, null in lines:
        for b, row in enumerate(rows[:, source].tolist()):
            inside = low <= row < high and (row - low) % stride == offset
            truth[first + b * width] = (row - low) // stride + base if inside else null
    assert torch.equal(out.cpu(), truth)


def segments_of(size, dims, device):
    """Segments side by side with a gap, of one to three sources each, in blocks of their own."""
    items, column, start = [], 2, 3
    for i, dim in enumerate(dims):
        sources = []
        for _ in range(1 + i % 3):
            sources.append(Source(start, dim + i % 2))
            start += size * (dim + i % 2)
        items.append(Segment(column, dim, tuple(sources), adds=i % 4 == 3))
        column += dim
    return Segments(items, device), column + 1, start + 5


@pytest.mark.parametrize("dims", [[1], [4, 4, 4, 4], [3, 33, 1, 7, 100], [128] * 5])
@pytest.mark.parametrize("wire", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_join_and_cut(device, dims, wire, scaled):
    for size in (0, 1, 37):
        rng = torch.Generator().manual_seed(size)
        segments, width, count = segments_of(size, dims, device)
        taken = torch.randn(count, generator=rng).to(wire)
        factors = torch.rand(size, len(dims), generator=rng) + 0.5 if scaled else None
        first = torch.randn(size, width, generator=rng)
        out, sent = first.clone().to(device), torch.zeros(count, dtype=wire, device=device)
        there = None if factors is None else factors.to(device)
        gpu.join_blocks(taken.to(device), segments, out, there)
        gpu.cut_blocks(first.to(device), segments, sent, there)
        wide = torch.full((size, width + 8), math.nan, device=device)  # columns of a wider matrix give the same
        wide[:, 4 : 4 + width] = first.to(device)
        again = torch.zeros_like(sent)
        gpu.cut_blocks(wide[:, 4 : 4 + width], segments, again, there)
        assert torch.equal(again, sent)
        few = torch.zeros_like(sent)
        gpu.cut_blocks(first.to(device), segments, few, there, aside=True)
        assert torch.equal(few, sent)
        truth, cut = first.double(), torch.zeros(count, dtype=torch.float64)
        for i, one in enumerate(segments.items):
            factor = 1.0 if factors is None else factors[:, i : i + 1].double()
            place = slice(one.column, one.column + one.dim)
            total = truth[:, place] if one.adds else 0.0
            for source in one.sources:
                total = total + factor * taken.double().as_strided((size, one.dim), (source.width, 1), source.start)
                cut.as_strided((size, one.dim), (source.width, 1), source.start).copy_(factor * first[:, place])
            truth[:, place] = total
        # Up to three numbers of some units, times factors, summed in float32.
        torch.testing.assert_close(out.cpu().double(), truth, rtol=1e-6, atol=2e-6)
        digits = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-10}[wire]  # rounded once, and twice
        torch.testing.assert_close(sent.cpu().double(), cut, rtol=2 * digits, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 3, 33, 128])
@pytest.mark.parametrize("weighted", [False, True])
def test_pool_columns(device, dim, weighted):
    counts = [1, 1, 2, 20, 3]
    for size, dtype in ((0, torch.int32), (1, torch.int64), (29, torch.int32)):
        rng = torch.Generator().manual_seed(size)
        storage = torch.randn(40, dim, generator=rng)
        storage[35:] = 0.0
        rows = torch.randint(0, 40, (size, sum(counts)), generator=rng).to(dtype)
        weights = torch.rand(rows.shape, generator=rng) if weighted else None
        pieces, first = [], 0
        for p, count in enumerate(counts):
            pieces.append(PooledPiece(first, count, (len(counts) - 1 - p) * dim + 1))
            first += count
        out = torch.full((size, dim * len(counts) + 2), -3.0, device=device)
        moved = None if weights is None else weights.to(device)
        gpu.pool_columns(storage.to(device), rows.to(device), tuple(pieces), out, moved, 40)
        unread, fewer = torch.full_like(out, -3.0), storage.clone()
        fewer[35:] = math.nan
        gpu.pool_columns(fewer.to(device), rows.to(device), tuple(pieces), unread, moved, 35)
        assert torch.equal(unread, out)
        truth = torch.full(out.shape, -3.0, dtype=torch.float64)
        vectors = storage.double()[rows.long()] * (1.0 if weights is None else weights.double().unsqueeze(2))
        for piece in pieces:
            truth[:, piece.target : piece.target + dim] = vectors[:, piece.first : piece.first + piece.count].sum(1)
        torch.testing.assert_close(out.cpu().double(), truth, rtol=1e-6, atol=1e-5)  # sums of 20 in float32


def test_the_same_bits_whoever_else_is_pooled(device):
    """A piece's sum is that of its own columns in their order: twice the same bits."""
    rng = torch.Generator().manual_seed(0)
    storage, rows = (
        torch.randn(9, 16, generator=rng).to(device),
        torch.randint(0, 9, (50, 12), generator=rng).to(device),
    )
    found = []
    for _ in range(2):
        out = torch.empty(50, 32, device=device)
        gpu.pool_columns(storage, rows, (PooledPiece(0, 11, 0), PooledPiece(11, 1, 16)), out, None, len(storage))
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize("front", [16, 3])
def test_columns_of_wider_rows_are_pooled_and_joined(device, front):
    rng = torch.Generator().manual_seed(0)
    storage, rows = (
        torch.randn(9, 16, generator=rng).to(device),
        torch.randint(0, 9, (50, 12), generator=rng).to(device),
    )
    blocks = torch.randn(50 * 16, generator=rng).to(device)
    segments = Segments([Segment(16, 16, (Source(0, 16),))], torch.device(device))
    whole, narrow = (torch.full((50, n), -3.0, device=device) for n in (front + 32 + 16, 32))
    for out in (whole[:, front : front + 32], narrow):
        gpu.pool_columns(storage, rows, (PooledPiece(0, 11, 0),), out, None, len(storage))
        gpu.join_blocks(blocks, segments, out, None)
    assert torch.equal(whole[:, front : front + 32], narrow)
    assert (whole[:, :front] == -3).all()
    assert (whole[:, front + 32 :] == -3).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_first_difference(device, dtype):
    truth = torch.arange(5000, dtype=dtype, device=device)
    for places in ([], [0], [4999], [4000, 1023, 1024]):
        found = truth.clone()
        found[places] = -7
        record = gpu.first_difference(found, truth).tolist()
        assert record[0] == bool(places)
        assert not places or record[1:] == [min(places), -7]
    assert gpu.first_difference(truth[:0], truth[:0]).tolist()[0] == 0


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_sum_pieces(device, dtype, pieces):
    """In order and rounded once, as the reference is; what is outside of the range stays."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter rounds to bfloat16 otherwise than a GPU does")
    length = 5024
    starts = torch.tensor([5040 * p for p in reversed(range(pieces))])
    rng = torch.Generator().manual_seed(pieces)
    given = torch.randn(5040 * pieces, generator=rng) * 10.0 ** torch.randint(-3, 4, (5040 * pieces,), generator=rng)
    given = given.to(dtype)
    given[::3] = -0.0
    for first, stop in ((0, length), (16, 48), (2048, 4112), (32, 32)):
        found, truth = given.clone().to(device), given.clone()
        gpu.sum_pieces(found, starts.to(device), first, stop)
        total = truth[starts[0] + first : starts[0] + stop].float()
        for start in starts[1:].tolist():
            total = total + truth[start + first : start + stop].float()
        for start in starts.tolist():
            truth[start + first : start + stop] = total.to(dtype)
        assert torch.equal(found.cpu(), truth)
        assert torch.equal(found.cpu().signbit(), truth.signbit())
        plain = given.clone()
        reference.sum_pieces(plain, starts, first, stop)
        assert torch.equal(plain, truth)
        assert torch.equal(plain.signbit(), truth.signbit())


def test_a_range_of_pieces_is_of_whole_groups(device):
    with pytest.raises(VivianeError, match=r"8 to 16[\s\S]*multiples of 16"):
        sum_pieces(torch.zeros(32, device=device), torch.tensor([0, 16], device=device), 8, 16)
