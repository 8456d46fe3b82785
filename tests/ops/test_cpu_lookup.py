"""Lookup and pooling on the CPU against the reference in float64; nasty shapes; threads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops import embedding_bag as op
from viviane.ops.embedding_bag import reference

TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Kernels are compiled per width and type; these cover whole cache lines, rests, and less than one line.
DIMS = [1, 3, 7, 16, 33, 100]


def table(num_rows, dim, dtype, generator):
    return torch.randn(num_rows, dim, generator=generator).to(dtype)


def places(dim, features, gap):
    """Columns in an order of their own with room between them, and the output's width."""
    step = dim + gap
    return [step * (features - 1 - f) for f in range(features)], step * features


@pytest.mark.parametrize("dim", DIMS)
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_gather_copies_bits(dim, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    size, features = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    dtype, num_rows = data.draw(st.sampled_from(TYPES)), data.draw(st.integers(1, 9))
    rows = torch.randint(num_rows, (size, features), generator=generator)
    rows = rows.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    storage, (columns, width) = (
        table(num_rows, dim, dtype, generator),
        places(dim, features, data.draw(st.integers(0, 2))),
    )
    out, expected = (torch.full((size, width), 7.0, dtype=dtype) for _ in range(2))
    op.gather_rows(storage, rows, out, columns)
    reference.gather_rows(storage, rows, expected, tuple(columns), None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("dim", "dtype", "out_dtype"), [
    (7, torch.float32, torch.float32), (7, torch.float32, torch.bfloat16), (16, torch.bfloat16, torch.float32),
    (33, torch.float16, torch.bfloat16), (16, torch.float32, torch.float16), (1, torch.bfloat16, torch.bfloat16),
])  # fmt: skip
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_weights_and_types(dim, dtype, out_dtype, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    size, features, num_rows = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    rows = torch.randint(num_rows, (size, features), generator=generator)
    weights = torch.randn(size, features, generator=generator) if data.draw(st.booleans()) else None
    storage, (columns, width) = table(num_rows, dim, dtype, generator), places(dim, features, 1)
    out, expected = (torch.full((size, width), 7.0, dtype=out_dtype) for _ in range(2))
    op.gather_rows(storage, rows, out, columns, weights)
    reference.gather_rows(storage, rows, expected, tuple(columns), weights)
    # One product in float32, one rounding, in both: equal to the bit.
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("dim", "dtype", "out_dtype"), [
    (1, torch.float32, torch.float32), (7, torch.float32, torch.bfloat16), (16, torch.bfloat16, torch.float32),
    (33, torch.float16, torch.float16), (100, torch.float32, torch.float32),
])  # fmt: skip
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_pooling(dim, dtype, out_dtype, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    size, features, num_rows = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=size * features, max_size=size * features))
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randint(num_rows, (total,), generator=generator)
    rows = rows.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    weights = torch.randn(total, generator=generator) if data.draw(st.booleans()) else None
    storage, (columns, width) = table(num_rows, dim, dtype, generator), places(dim, features, 1)
    out, expected = torch.full((size, width), 7.0, dtype=out_dtype), torch.full((size, width), 7.0, dtype=torch.float64)
    op.pool_rows(storage, rows, offsets, out, columns, weights)
    wide = None if weights is None else weights.double()
    reference.pool_rows(storage.double(), rows, offsets, expected, tuple(columns), wide)
    # Sums of at most 6 products of size about 3 in float32 (error below 6 * 2^-24 * 20), then one rounding.
    tolerance = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[out_dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance * 1.01, atol=1e-5)


def test_a_bag_of_one_row_100_000_times_and_empty_batches():
    storage, out = torch.full((3, 7), 0.5), torch.empty(2, 7)
    rows = torch.full((100_000,), 2)
    op.pool_rows(storage, rows, torch.tensor([0, 100_000, 100_000]), out, [0])
    assert out.tolist() == [[50_000.0] * 7, [0.0] * 7]  # halves: exact in float32
    none = torch.zeros(0, dtype=torch.int64)
    op.pool_rows(storage, none, torch.zeros(1, dtype=torch.int64), torch.empty(0, 7), [0])
    op.gather_rows(storage, none.view(0, 1), torch.empty(0, 7), [0])
    op.gather_rows(torch.empty(0, 7), none.view(0, 1), torch.empty(0, 7), [0])


def test_outputs_beyond_the_caches_are_written_whole():
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(1000, 128, generator=generator)
    rows = torch.randint(1000, (16384, 8), generator=generator)
    out = torch.zeros(16384 * 1024 + 16)
    start = -out.data_ptr() // 4 % 16  # rows then begin at cache lines, as the streamed stores need
    matrix = out[start : start + 16384 * 1024].view(16384, 1024)
    op.gather_rows(storage, rows, matrix, range(0, 1024, 128))
    assert torch.equal(matrix.view(-1, 128), storage[rows.flatten()])


def test_threads_do_not_change_a_bit(on_threads):
    generator = torch.Generator().manual_seed(3)
    storage = torch.randn(50, 16, generator=generator)
    rows = torch.randint(50, (40_000,), generator=generator)
    offsets = torch.tensor([0, 7, 7, 30_000, 40_000])

    def pooled():
        out = torch.empty(2, 32)
        op.pool_rows(storage, rows, offsets, out, [0, 16])
        return out

    first, *others = on_threads(pooled)
    assert all(torch.equal(first, other) for other in others)


def test_mean_weights():
    offsets, weights = torch.tensor([0, 2, 2, 5, 6]), torch.tensor([1.0, 3.0, 2.0, 2.0, 4.0, 0.0])
    counted = torch.tensor([True, False, True, True, True, True])
    assert op.mean_weights(offsets, None, None, 6).tolist() == pytest.approx([0.5, 0.5, 1 / 3, 1 / 3, 1 / 3, 1.0])
    assert op.mean_weights(offsets, counted, None, 6).tolist() == pytest.approx([1.0, 0.0, 1 / 3, 1 / 3, 1 / 3, 1.0])
    assert op.mean_weights(offsets, None, weights, 6).tolist() == [0.25, 0.75, 0.25, 0.25, 0.5, 0.0]
    assert op.mean_weights(offsets, counted, weights, 6).tolist() == [1.0, 0.0, 0.25, 0.25, 0.5, 0.0]
    assert op.mean_weights(torch.tensor([0, 0]), None, None, 0).shape == (0,)
    assert op.entry_bags(offsets, 6).tolist() == [0, 0, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2), torch.zeros(1, 1), torch.empty(1, 2), [0]), "int32 or int64"),
        ((torch.ones(2, 4).t(), torch.zeros(1, 1, dtype=torch.int64), torch.empty(1, 2), [0]), "contiguous matrix"),
        ((torch.ones(2, 2), torch.zeros(1, 1, dtype=torch.int64), torch.empty(1, 2), [1]), "does not fit"),
        ((torch.ones(2, 2).double(), torch.zeros(1, 1, dtype=torch.int64), torch.empty(1, 2), [0]), "float64"),
    ],
)
def test_malformed_arguments_are_named(arguments, message):
    with pytest.raises(VivianeError, match=message):
        op.gather_rows(*arguments)
