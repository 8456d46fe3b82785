"""Copies of many tensors: the same numbers as one by one, whatever their sizes and types."""

import pytest
import torch

from viviane.ops.copies import LARGE_BYTES, copy_each


def test_large_small_empty_and_mixed_types():
    rng = torch.Generator().manual_seed(0)
    sizes = [(3,), (0,), (LARGE_BYTES // 4, 2), (5, 7), (), (LARGE_BYTES // 4 - 1,)]
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    sources = [torch.randn(size, generator=rng).to(kind) for size in sizes for kind in kinds]
    targets = [torch.full_like(one, 9.0, dtype=torch.bfloat16) for one in sources]
    copy_each(targets, sources)
    assert all(torch.equal(target, source.to(torch.bfloat16)) for target, source in zip(targets, sources, strict=True))
    copy_each([], [])
    with pytest.raises(ValueError, match="shorter"):
        copy_each(targets, sources[:-1])
