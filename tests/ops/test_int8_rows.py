"""Rows of 8 bits: how far they may be from the rows they were, and the kernels against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from viviane.core.errors import VivianeError
from viviane.ops import int8_rows as op
from viviane.ops.int8_rows import reference

DIMS = [1, 3, 16, 33]
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(NUMBERS, min_size=1, max_size=9))
@example([3.4028235e38, -3.4028235e38, 0.0])
@example([1e-45, 0.0])
@example([7.25] * 5)
@example([1e8, 1e8 + 8])
def test_a_number_is_at_most_half_a_step_away(row) -> None:
    """Half a step of the row, the rounding of the sum, and what is lost where a step is no normal float32."""
    x = torch.tensor([row], dtype=torch.float32)
    found = op.dequantize(op.quantize(x), len(row))[0].double()
    low, high = x.double().min(), x.double().max()
    bound = (high - low) / 255 * (0.5 + 256 * 2**-24) + 2**-23 * max(abs(low), abs(high)) + 256 * 2**-149
    assert torch.isfinite(found).all()
    assert ((found - x[0].double()).abs() <= bound).all()
    assert found.min() >= low - bound
    assert torch.equal(op.quantize(x)[0, -4:].view(torch.float32), x.min().view(1))  # the offset is exact


def test_by_hand() -> None:
    """255 steps of 0.5 from -1: codes 0, 3, 255; padding to 4 numbers; scale and offset behind."""
    made = op.quantize(torch.tensor([[-1.0, 0.6, 126.5]]))
    assert made.shape == (1, 12)
    assert made[0, :4].tolist() == [0, 3, 255, 0]
    assert made[0, 4:].contiguous().view(torch.float32).tolist() == [0.5, -1.0]
    assert op.dequantize(made, 3).tolist() == [[-1.0, 0.5, 126.5]]


def test_rows_that_have_no_8_bit_form() -> None:
    bad = torch.ones(70_000, 2)
    bad[66_001, 1] = float("nan")
    with pytest.raises(VivianeError, match="not finite") as error:
        op.quantize(bad)
    assert error.value.where == "row 66001"
    with pytest.raises(VivianeError, match="no numbers"):
        op.quantize(torch.empty(3, 0))
    with pytest.raises(VivianeError, match="not a table of 8-bit rows"):
        op.dequantize(torch.zeros(3, 12, dtype=torch.uint8), 5)


@pytest.mark.parametrize("dim", DIMS)
@given(data=st.data())
@settings(max_examples=15)
def test_lookup_and_pooling_are_the_references(dim, data) -> None:
    """To the rounding of sums, whose order and fusing may differ."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    size, features, num_rows = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    storage = op.quantize(torch.randn(num_rows, dim, generator=generator))
    kind, out_dtype = (
        data.draw(st.sampled_from([torch.int32, torch.int64])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )
    width = (dim + 1) * features
    columns = tuple((dim + 1) * (features - 1 - f) for f in range(features))
    tolerance = {"rtol": 2e-2 if out_dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    rows = torch.randint(num_rows, (size, features), generator=generator).to(kind)
    weights = torch.randn(size, features, generator=generator) if data.draw(st.booleans()) else None
    out, expected = (torch.full((size, width), 7.0, dtype=out_dtype) for _ in range(2))
    op.gather_rows(storage, dim, rows, out, columns, weights)
    reference.gather_rows(storage, dim, rows, expected, columns, weights)
    torch.testing.assert_close(out, expected, **tolerance)
    lengths = torch.randint(4, (features * size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    entries = torch.randint(num_rows, (int(offsets[-1]),), generator=generator).to(kind)
    weights = torch.randn(len(entries), generator=generator) if data.draw(st.booleans()) else None
    out, expected = (torch.full((size, width), 7.0, dtype=out_dtype) for _ in range(2))
    op.pool_rows(storage, dim, entries, offsets, out, columns, weights)
    reference.pool_rows(storage, dim, entries, offsets, expected, columns, weights)
    torch.testing.assert_close(out, expected, **tolerance)


def test_the_layout_is_that_of_fbgemm() -> None:
    """Where it is installed: its operator reads our rows as the same numbers."""
    quantized = getattr(torch.ops.quantized, "embedding_bag_byte_unpack", None)
    if quantized is None:
        pytest.skip("this torch has no quantized operators")
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 16)).astype("float32"))
    made = op.quantize(rows)
    torch.testing.assert_close(quantized(made), op.dequantize(made, 16), rtol=0, atol=1e-6)
    theirs = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    assert (theirs[:, :16].int() - made[:, :16].int()).abs().max() <= 1  # ties
