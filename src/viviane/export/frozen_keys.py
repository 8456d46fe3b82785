"""The keys of a frozen dynamic table, in a layout whose lookups take a fixed number of steps.

Shapes: K keys, 2^b buckets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from viviane.ops.key_rows import mix

_KEYS_PER_BUCKET: Final = 2
_SEEDS: Final = 8
"""Number of seeds to try; the one with the smallest largest bucket is used."""


@dataclass(frozen=True)
class FrozenKeys:
    """Keys, ordered by bucket.

    Args:
        keys: (K,), int64.
        order: (K,): index of each key among the given keys.
        starts: (2^b,), int32 or int64: start of each bucket.
        seed: mixed into keys.
        width: size of the largest bucket.
    """

    keys: Tensor
    order: Tensor
    starts: Tensor
    seed: int
    width: int


def freeze_keys(keys: Tensor) -> FrozenKeys:
    """Sort distinct keys (K,), int64, into buckets by their first mixed bits.

    Seeds are derived from a checksum of the keys, so equal keys give equal buckets, and no attacker can choose keys
    that share a bucket.

    Example:
        >>> frozen = freeze_keys(torch.tensor([7, -7, 2**62]))
        >>> sorted(frozen.keys.tolist()), frozen.width <= 3
        ([-7, 7, 4611686018427387904], True)
    """
    count = len(keys)
    bits = max(count // _KEYS_PER_BUCKET - 1, 0).bit_length()
    best: tuple[int, int, Tensor] | None = None
    digest = hashlib.sha256(keys.contiguous().numpy().tobytes()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    for _ in range(_SEEDS if bits else 1):
        seed = int(torch.randint(-(2**62), 2**62, (), generator=generator)) if bits else 0
        buckets = mix(keys ^ seed) >> (63 - bits) if bits else torch.zeros_like(keys)
        width = int(torch.bincount(buckets, minlength=1 << bits).max()) if count else 1
        if best is None or width < best[0]:
            best = (width, seed, buckets)
    assert best is not None
    width, seed, buckets = best
    order = torch.argsort(buckets, stable=True)
    sizes = torch.bincount(buckets, minlength=1 << bits)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    return FrozenKeys(keys[order], order, starts.to(torch.int32 if count < 2**31 else torch.int64), seed, width)
