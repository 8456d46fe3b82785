"""Checking bags on a GPU: one launch for all bags of a batch, or for each 64 of them; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.bag_checks import LAST
from viviane.ops.triton_parts.addresses import address_of, count_of, odd, pick
from viviane.ops.triton_parts.launch import ceil_div, on_device

_TILE = 2048
_MOST = 64  # features of a launch: a kernel's arguments have little room
_last = tl.constexpr(LAST)


def check_bags(
    offsets: Sequence[Tensor], counts: Sequence[int], weights: Sequence[Tensor | None], kept: Tensor | None = None
) -> Tensor:
    """Return the record of the first wrong offset or weight."""
    size, features = len(offsets[0]), len(offsets)
    record = torch.zeros(3, dtype=torch.int64, device=offsets[0].device) if kept is None else kept
    start = features * size
    with on_device(record):
        for first in range(0, features, _MOST):
            part = slice(first, first + _MOST)
            own = offsets[part]
            given = [None if one is None or not len(one) else one for one in weights[part]]
            lengths = [0 if one is None else len(one) for one in given]
            # What no launch reads has any address: that of nothing, zero, would be compiled for.
            weights_at = tuple(address_of(offsets[0] if one is None else one) for one in given)
            check_bags_kernel[(ceil_div(max(size, *lengths), _TILE), len(own), 2 if any(lengths) else 1)](
                tuple(map(address_of, own)), tuple(map(odd, counts[part])), weights_at, tuple(map(odd, lengths)),
                record, size, first * size, start, tile=_TILE,
            )  # fmt: skip
            start += sum(counts[part])
    return record


@triton.jit(do_not_specialize=["size", "first", "start"])
def check_bags_kernel(offsets, counts, weights, lengths, record, size, first, start, tile: tl.constexpr):
    """Check `tile` offsets of one feature, or as many weights: the third grid axis selects it.

    Args:
        offsets, weights: addresses, as `address_of` writes them.
        counts, lengths: of entries and of weights, as `odd` writes them.
        first: place of the first offset.
        start: place of the first weight.
    """
    f = tl.program_id(1)
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    count = tl.full([], 0, tl.int64)
    length = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)
    for i in tl.static_range(len(counts)):
        before += tl.where(i < f, count_of(counts, i), 0)
        count = tl.where(f == i, count_of(counts, i), count)
        length = tl.where(f == i, count_of(lengths, i), length)
    if tl.program_id(2) == 0:
        ends = (pick(offsets, f) & -4).to(tl.pointer_type(tl.int64))
        here = n < size
        own = tl.load(ends + n, mask=here, other=0)
        ahead = tl.load(ends + n - 1, mask=here & (n > 0), other=0)
        wrong = (own < ahead) | (own < 0) | (own > count) | ((n == 0) & (own != 0)) | ((n == size - 1) & (own != count))
        place = first + f.to(tl.int64) * size + n
    else:
        numbers = (pick(weights, f) & -4).to(tl.pointer_type(tl.int32))
        here = n < length
        bits = tl.load(numbers + n, mask=here, other=0)
        wrong = (bits & 0x7F800000) == 0x7F800000
        place = start + before + n
    wrong = here & wrong
    if tl.max(wrong.to(tl.int32), 0) > 0:
        tl.atomic_max(record, 1)
        tl.atomic_max(record + 1, tl.max(tl.where(wrong, _last - place, 0), 0))
