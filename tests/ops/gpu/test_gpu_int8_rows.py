"""8-bit rows on a GPU, or in Triton's interpreter: lookups and pooling as the reference has them."""

import pytest
import torch

from viviane.ops import int8_rows as op
from viviane.ops.dispatch import use_implementation
from viviane.ops.int8_rows import reference


@pytest.mark.parametrize(("dim", "size", "out_dtype"), [(16, 9, torch.float32), (5, 3, torch.bfloat16)])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup_and_pooling(device, dim, size, out_dtype, weighted):
    generator = torch.Generator().manual_seed(dim)
    storage = op.quantize(torch.randn(11, dim, generator=generator)).to(device)
    columns, width = (dim + 3, 0), 2 * dim + 3
    tolerance = {"rtol": 2e-2 if out_dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    rows = torch.randint(11, (size, 2), generator=generator, dtype=torch.int32).to(device)
    weights = torch.randn(size, 2, generator=generator).to(device) if weighted else None
    out, expected = (torch.full((size, width), 7.0, dtype=out_dtype, device=device) for _ in range(2))
    with use_implementation("gpu"):
        op.gather_rows(storage, dim, rows, out, columns, weights)
    reference.gather_rows(storage, dim, rows, expected, columns, weights)
    torch.testing.assert_close(out, expected, **tolerance)
    lengths = torch.randint(6, (2 * size,), generator=generator)
    lengths[0] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    entries = torch.randint(11, (int(offsets[-1]),), generator=generator).to(device)
    weights = torch.randn(len(entries), generator=generator).to(device) if weighted else None
    out, expected = (torch.full((size, width), 7.0, dtype=out_dtype, device=device) for _ in range(2))
    with use_implementation("gpu"):
        op.pool_rows(storage, dim, entries, offsets, out, columns, weights)
    reference.pool_rows(storage, dim, entries, offsets, expected, columns, weights)
    torch.testing.assert_close(out, expected, **tolerance)
