"""Checking bags on the CPU: one call for all bags of a batch, whose loops have no branches where all is right."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from numba import int64
from torch import Tensor

from viviane.ops.bag_checks import LAST
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, num_threads, sources
from viviane.ops.native.memory import int32_at, int64_at, lower_to, take_ticket

_NEVER: Final = 2**63 - 1
_WORDS: Final = 3  # of a feature: address of its offsets, number of entries, address of its weights or 0
_MAGNITUDE: Final = 0x7FFFFFFF
_EXPONENT_STEP: Final = 0x00800000
_LIGHT: Final = 16  # numbers checked in the time that other kernels take for one


def check_bags(
    offsets: Sequence[Tensor], counts: Sequence[int], weights: Sequence[Tensor | None], kept: Tensor | None = None
) -> Tensor | None:
    """Return the record of the first wrong offset or weight; None where all are right."""
    features, size = len(offsets), len(offsets[0])
    words: list[int] = []
    work = features * size
    for own, count, one in zip(offsets, counts, weights, strict=True):
        words += (own.data_ptr(), count, 0 if one is None else one.data_ptr())
        work += 0 if one is None else count
    bags = (ctypes.c_int64 * len(words))(*words)
    first_wrong = ctypes.c_int64(_NEVER)
    check_kernel(sources())(
        (ctypes.addressof(bags), features, size, ctypes.addressof(first_wrong)),
        tickets=features, threads=num_threads(work // _LIGHT),
    )  # fmt: skip
    place = first_wrong.value
    if kept is not None and place != _NEVER:
        kept.copy_(torch.maximum(kept, torch.tensor([1, LAST - place, 0])))
    if kept is not None:
        return kept
    return None if place == _NEVER else torch.tensor([1, LAST - place, 0])


@cache
def check_kernel(key: str) -> Kernel:
    """Build the kernel; a ticket is a feature."""

    @kernel
    def check_offsets_and_weights(call):  # type: ignore[no-untyped-def]
        _ = key
        bags, features, size = int64_at(call[OPERANDS]), call[OPERANDS + 1], call[OPERANDS + 2]
        first_wrong = int64_at(call[OPERANDS + 3])
        f = take_ticket(call)
        while f < features:
            ends, count, weighted = int64_at(bags[f * _WORDS]), bags[f * _WORDS + 1], bags[f * _WORDS + 2]
            # The sign tells: of an offset, or of a difference, which does not overflow where both are at least 0.
            signs = ends[0]
            for b in range(1, size):
                signs |= ends[b] | (ends[b] - ends[b - 1])
            if signs < 0 or ends[0] != 0 or ends[size - 1] != count:
                before = 0
                for b in range(size):
                    own = ends[b]
                    bad = own < before or own > count or (b == 0 and own != 0) or (b == size - 1 and own != count)
                    if bad:
                        lower_to(first_wrong, f * size + b)
                        break
                    before = own
            if weighted != 0:
                bits = int32_at(weighted)
                carried = int64(0)
                for n in range(count):
                    # An exponent of ones alone, that of NaN and the infinities, carries into the sign.
                    carried |= (int64(bits[n]) & _MAGNITUDE) + _EXPONENT_STEP
                if carried > _MAGNITUDE:
                    start = features * size
                    for i in range(f):
                        start += bags[i * _WORDS + 1]
                    for n in range(count):
                        if (int64(bits[n]) & _MAGNITUDE) + _EXPONENT_STEP > _MAGNITUDE:
                            lower_to(first_wrong, start + n)
                            break
            f = take_ticket(call)

    return check_offsets_and_weights
