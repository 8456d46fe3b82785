"""Lookup and pooling on a GPU against the plain truth."""

import pytest
import torch

from viviane.ops.embedding_bag import gpu, reference

ON_GPU = torch.cuda.is_available()
# Sums of some dozens of float32 numbers near 1, added in another order than the truth's: 2^-24 for each addition.
SUMS = {"rtol": 1e-5, "atol": 1e-5}
# The sum in float32 and the truth in float64 may round to neighbouring numbers of 16 bits.
HALF = {torch.float32: SUMS, torch.float16: {"rtol": 2e-3, "atol": 1e-3}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}


def table(device, num_rows, dim, dtype=torch.float32):
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(dim)).to(dtype).to(device)


def poisoned(device, size, width, dtype=torch.float32):
    return torch.full((size, width), -777.0, dtype=dtype, device=device)


def ids(device, shape, high, dtype=torch.int32):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1), dtype=dtype).to(device)


def factors(device, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device)


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 100, 128])
@pytest.mark.parametrize("regular", [True, False])
def test_rows_are_copied_to_their_columns_and_nowhere_else(device, dim, regular):
    storage, size = table(device, 11, dim), 5
    columns = (0, dim, 2 * dim) if regular else (2 * dim + 3, 0, dim + 1)
    rows = ids(device, (size, 3), 11, torch.int64 if regular else torch.int32)
    rows[0, 0], rows[1, 1] = 0, 10
    out = poisoned(device, size, 3 * dim + 4)
    expected = out.clone()
    gpu.gather_rows(storage, rows, out, columns, None)
    reference.gather_rows(storage, rows, expected, columns, None)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dim", [3, 128])
def test_few_programs_copy_the_same(device, dim):
    """Each of them takes one tile after another; the last one is not whole."""
    storage, rows = table(device, 50, dim), ids(device, (301, 3), 50)
    out = poisoned(device, 301, 3 * dim)
    expected = out.clone()
    columns = (0, dim, 2 * dim)
    gpu.gather_rows(storage, rows, out, columns, factors(device, (301, 3)), aside=True)
    reference.gather_rows(storage, rows, expected, columns, factors(device, (301, 3)))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_types_and_weights(device, dtype, out_dtype):
    storage, rows = table(device, 9, 8, dtype), ids(device, (4, 2), 9)
    for weights in (None, factors(device, (4, 2))):
        out = poisoned(device, 4, 16, out_dtype)
        expected = out.clone()
        gpu.gather_rows(storage, rows, out, (0, 8), weights)
        reference.gather_rows(storage, rows, expected, (0, 8), weights)
        if ON_GPU or out_dtype != torch.bfloat16:
            assert torch.equal(out, expected)  # one product in float32, one rounding: nothing may differ
        else:  # the interpreter of Triton 3.6 cuts where a GPU rounds to nearest: one unit of 2^-7
            torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)


def bags(device, lengths, num_rows, dtype=torch.int32):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    return ids(device, (sum(lengths),), num_rows, dtype), offsets


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 100, 128])
@pytest.mark.parametrize("lengths", [[1] * 6, [0, 3, 0, 0, 7, 1], [20, 0, 40, 5, 1, 0], [0] * 6], ids=str)
def test_bags_are_summed(device, dim, lengths):
    storage = table(device, 13, dim)
    rows, offsets = bags(device, lengths, 13)
    for weights in (None, factors(device, rows.shape)):
        out = poisoned(device, 3, 2 * dim + 1)
        truth = out.double()
        gpu.pool_rows(storage, rows, offsets, out, (dim + 1, 0), weights)
        reference.pool_rows(storage.double(), rows, offsets, truth, (dim + 1, 0), weights)
        torch.testing.assert_close(out.double(), truth, **SUMS)
        assert (out[:, dim] == -777).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_other_types(device, dtype, out_dtype):
    storage, lengths = table(device, 9, 8, dtype), [2, 0, 5, 1]
    rows, offsets = bags(device, lengths, 9, torch.int64)
    out = poisoned(device, 4, 8, out_dtype)
    truth = out.double()
    gpu.pool_rows(storage, rows, offsets, out, (0,), None)
    reference.pool_rows(storage.double(), rows, offsets, truth, (0,), None)
    torch.testing.assert_close(out.double(), truth, **HALF[out_dtype])


@pytest.mark.parametrize("front", [8, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_columns_of_wider_rows_are_written_and_nothing_beside_them(device, front, size):
    storage, rows = table(device, 11, 8), ids(device, (size, 3), 11)
    offsets = torch.arange(0, 3 * size + 1, device=device)
    for columns in ((0, 8, 16), (16, 0, 8)):
        for write in (
            lambda module, out, columns=columns: module.gather_rows(storage, rows, out, columns, None),
            lambda module, out, columns=columns: module.gather_rows(storage, rows, out, columns, None, aside=True),
            lambda module, out, columns=columns: module.pool_rows(
                storage, rows.view(-1), offsets, out, columns, None
            ),
        ):  # fmt: skip
            whole = poisoned(device, size, front + 24 + 8)
            expected = whole.clone()
            write(gpu, whole[:, front : front + 24])
            write(reference, expected[:, front : front + 24])
            assert torch.equal(whole, expected)


def test_nothing_to_do(device):
    none, out = torch.zeros(0, dtype=torch.int32, device=device), poisoned(device, 0, 4)
    storage = table(device, 3, 4)
    gpu.gather_rows(storage, none.view(0, 1), out, (0,), None)
    gpu.pool_rows(storage, none, torch.zeros(1, dtype=torch.int64, device=device), out, (0,), None)
    out = poisoned(device, 2, 4)
    gpu.pool_rows(storage, none, torch.zeros(3, dtype=torch.int64, device=device), out, (0,), None)
    assert (out == 0).all()


def test_not_a_number_stays_in_its_bag(device):
    storage = table(device, 4, 3)
    storage[3, 1] = float("nan")
    rows, offsets = torch.tensor([0, 3, 1, 2]).to(device), torch.tensor([0, 1, 2, 4]).to(device)
    out = poisoned(device, 3, 3)
    gpu.pool_rows(storage, rows, offsets, out, (0,), None)
    assert out.isnan().nonzero().tolist() == [[1, 1]]


def test_a_long_bag_gives_the_same_bits_again(device):
    storage, lengths = table(device, 50, 4), [1, 3000, 0, 2]
    rows, offsets = bags(device, lengths, 50)
    rows[5:2000] = 7
    found = []
    for _ in range(2):
        out = poisoned(device, 4, 4)
        gpu.pool_rows(storage, rows, offsets, out, (0,), None)
        found.append(out)
    assert torch.equal(*found)
    truth = poisoned(device, 4, 4).double()
    reference.pool_rows(storage.double(), rows, offsets, truth, (0,), None)
    # 3000 additions, each rounded by up to 2^-24 of a running sum of up to 5000.
    torch.testing.assert_close(found[0].double(), truth, rtol=1e-4, atol=0.02)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_table_of_more_than_two_to_the_31_numbers(device):
    storage = torch.empty(2**24 + 2**20, 128, dtype=torch.float16, device=device)
    storage[-1] = 3.0
    rows = torch.full((2, 1), len(storage) - 1, dtype=torch.int32, device=device)
    out = poisoned(device, 2, 128)
    gpu.gather_rows(storage, rows, out, (0,), None)
    assert (out == 3).all()
    gpu.pool_rows(storage, rows.view(-1), torch.tensor([0, 2, 2]).to(device), out, (0,), None)
    assert out[:, 0].tolist() == [6.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [(0,), (8, 16, 24), (3, 0, 40, 12)])
@pytest.mark.parametrize("most", [0, 1, 5, 40])
def test_the_sources_of_entries(device, dtype, columns, most):
    for size in (1, 7, 300):
        lengths = torch.randint(most + 1, (size * len(columns),), generator=torch.Generator().manual_seed(size))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
        for given, count in ((offsets, int(offsets[-1])), (None, size * len(columns))):
            found, truth = (torch.full((count,), -7, dtype=dtype, device=device) for _ in range(2))
            gpu.entry_sources(given, columns, size, 61, found)
            reference.entry_sources(given, columns, size, 61, truth)
            assert torch.equal(found, truth)


def test_the_sources_of_a_bag_of_a_hundred_thousand_and_of_far_rows(device):
    offsets = torch.tensor([0, 0, 2, 100_002, 100_002, 100_003], device=device)
    whole = torch.zeros(100_005, dtype=torch.int64, device=device)
    gpu.entry_sources(offsets, (5,), 5, 2**40, whole[1:-1])
    places = [0, *[2**40 + 5] * 2, *[2 * 2**40 + 5] * 100_000, 4 * 2**40 + 5, 0]
    assert whole.tolist() == places
