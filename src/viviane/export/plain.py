"""Lookups in frozen tables with standard torch operators: the reference, and the content of ONNX, TorchScript, AOTI.

No control flow depends on the values of a batch, so every function can be traced with a batch of any size.

Shapes: B rows of the batch, F one-hot columns, N entries of bags, L slots of a "concat", R rows of a storage before
its two rows of zeros (see `viviane.ops.key_rows`), D their width, K frozen keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from viviane.ops.key_rows import HASH, RAISE, REPLACE, ColumnRule, mix

BEYOND: Final = 2
"""A refused key gets row R + 2, which does not exist, so that the lookup fails."""
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2: Final = 0x94D049BB133111EB - (1 << 64)


def key_rows(keys: Tensor, rules: Sequence[ColumnRule], null_row: int) -> Tensor:
    """Return the storage rows of keys (..., F), int64, by the policy of each column's table.

    A key that is out of range under "raise" gets row `null_row + BEYOND`.

    Args:
        keys: int32 or int64, one column per rule.
        rules: rules of the F columns.
        null_row: R.

    Example:
        >>> from viviane.ops.key_rows import SKIP
        >>> rules = [ColumnRule(base=10, num_rows=5, policy=SKIP, padding=0), ColumnRule(0, 5, RAISE)]
        >>> key_rows(torch.tensor([[4, 4], [0, 0], [7, 7]]), rules, 20).tolist()
        [[14, 4], [20, 0], [20, 22]]
    """
    keys = keys.to(torch.int64)

    def column(values: Sequence[int]) -> Tensor | int:
        return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=torch.int64, device=keys.device)

    rows = keys + column([rule.base for rule in rules])
    if any(rule.padding >= 0 for rule in rules):
        rows = torch.where(torch.eq(keys, column([rule.padding for rule in rules])), null_row, rows)
    num_rows = column([rule.num_rows for rule in rules])
    bad = (keys < 0) | (keys >= num_rows)
    refused = [_instead(rule, null_row) for rule in rules]
    # AOTInductor benchmarks its kernels on a GPU with zeros for all tensors: then each key is refused and needs an
    # existing row.
    instead = column(refused) if isinstance(num_rows, int) else torch.tensor(refused, device=keys.device)
    if any(rule.policy == HASH for rule in rules):
        hashed = _hashed(keys, rules, column)
        if all(rule.policy == HASH for rule in rules):
            instead = hashed
        else:
            takes_hash = torch.tensor([rule.policy == HASH for rule in rules], device=keys.device)
            instead = torch.where(takes_hash, hashed, instead)
    return torch.where(bad, instead, rows)


def _instead(rule: ColumnRule, null_row: int) -> int:
    if rule.policy == REPLACE:
        return rule.replacement
    return null_row + BEYOND if rule.policy == RAISE else null_row


def _hashed(keys: Tensor, rules: Sequence[ColumnRule], column: Callable[[Sequence[int]], Any]) -> Tensor:
    """Compute `viviane.ops.key_rows.hashed` for columns with different rules."""
    takes = [rule.policy == HASH for rule in rules]
    rest = [rule.num_rows - (rule.padding >= 0) if own else 1 for rule, own in zip(rules, takes, strict=True)]
    places: Tensor = mix(keys) % column(rest)
    if any(rule.padding >= 0 for rule in rules):
        places = places + (places >= column([rule.padding if rule.padding >= 0 else 2**62 for rule in rules]))
    found: Tensor = places + column([rule.base for rule in rules])
    return found


def find_keys(keys: Tensor, frozen: Tensor, starts: Tensor, seed: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the index of each key among frozen keys, int64, and whether it exists; absent keys have index 0.

    Keys of one bucket are adjacent; the bucket is given by the first bits of the mixed key.

    Args:
        keys: (...), int64.
        frozen: (K,), int64, K > 0.
        starts: (2^b,), start of each bucket.
        seed: mixed into keys.
        width: size of the largest bucket.
    """
    bits = 63 - (len(starts) - 1).bit_length()
    buckets = (mix(keys ^ seed) >> bits) if len(starts) > 1 else torch.zeros_like(keys)
    first = F.embedding(buckets, starts.unsqueeze(1)).to(torch.int64)
    places = (first + torch.arange(width, device=keys.device)).clamp_max(len(frozen) - 1)
    same = torch.eq(F.embedding(places, frozen.unsqueeze(1)).squeeze(-1), keys.unsqueeze(-1))
    return (places * same).amax(-1), same.any(-1)


def gather(weight: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a storage, (..., D); a row that does not exist is an error of the runtime.

    Example:
        >>> gather(torch.eye(3, dtype=torch.float16), torch.tensor([[2]]), torch.float32).tolist()
        [[[0.0, 0.0, 1.0]]]
    """
    return F.embedding(rows, weight).to(dtype)


def bag_of_entries(offsets: Tensor, count: int) -> Tensor:
    """Return the bag of each entry, (N,), int64; B for entries after the last bag.

    Args:
        offsets: (B + 1,), int64.
        count: N.

    Example:
        >>> bag_of_entries(torch.tensor([0, 2, 2, 3]), 4).tolist()
        [0, 0, 2, 3]
    """
    ends = offsets[1:]
    marks = torch.zeros(count + 1, dtype=torch.int64, device=offsets.device)
    return marks.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:count]


def pool(vectors: Tensor, bags: Tensor, size: int) -> Tensor:
    """Sum vectors (N, D) by their bags, (B, D).

    Args:
        vectors: vectors of the entries.
        bags: (N,), as `bag_of_entries` returns them.
        size: B.
    """
    out = torch.zeros(size + 1, vectors.shape[1], dtype=vectors.dtype, device=vectors.device)
    return out.scatter_add(0, bags.unsqueeze(1).expand_as(vectors), vectors)[:size]


def mean_weights(bags: Tensor, size: int, counted: Tensor | None, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weights that turn a sum by bag into a mean, (N,), as `viviane.ops.embedding_bag.mean_weights` does."""
    share = torch.ones(bags.shape, dtype=dtype, device=bags.device) if weights is None else weights.to(dtype)
    if counted is not None:
        share = share * counted
    totals = torch.zeros(size + 1, dtype=dtype, device=bags.device).scatter_add(0, bags, share)
    return share * torch.where(torch.eq(totals, 0), 0.0, 1.0 / totals)[bags]


def spread(entries: Tensor, offsets: Tensor, length: int, empty: int | float, refused: int | float | None) -> Tensor:
    """Arrange entries of bags as (B, L), padded with `empty`.

    Args:
        entries: (N,).
        offsets: (B + 1,), int64.
        length: L.
        empty: value of slots after the last entry.
        refused: value of bags that are longer than L; None: they are truncated.

    Example:
        >>> spread(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]), 2, -1, None).tolist()
        [[5, -1], [6, 7]]
    """
    places = torch.arange(length, device=entries.device)
    lengths = offsets.diff().unsqueeze(1)
    known = torch.cat([entries, entries.new_full((1,), empty)])
    at = torch.where(places < lengths, offsets[:-1].unsqueeze(1) + places, entries.shape[0])
    laid = known[at]
    return laid if refused is None else torch.where(lengths > length, refused, laid)


def initial_values(keys: Tensor, dim: int, kind: str, a: float, b: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Return the initial vectors of keys, (..., D), as `viviane.ops.hash_table.initial_rows` draws them.

    Args:
        keys: int64.
        dim: D.
        kind, a, b: the distribution.
        seed: seed of the table.
        dtype: type of the rows, to which values are rounded.
    """
    if kind == "constant":
        value = torch.tensor(a, dtype=torch.float32).to(dtype)
        return value.to(keys.device).expand(*keys.shape, dim)
    low, scale = torch.tensor([a, b - a if kind == "uniform" else b], dtype=torch.float32).tolist()
    start = _mix64(keys + _signed(seed * _GOLDEN))
    columns = [_signed((column + 1) * _GOLDEN) for column in range(dim)]
    bits = _mix64(start.unsqueeze(-1) + torch.tensor(columns, dtype=torch.int64, device=keys.device))
    if kind == "uniform":
        drawn = _shifted(bits, 40).to(torch.float64) / 2**24
    else:
        first, second = _shifted(bits, 32).to(torch.float64), (bits & 0xFFFFFFFF).to(torch.float64)
        drawn = (-2 * ((first + 0.5) / 2**32).log()).sqrt() * (2 * math.pi * second / 2**32).cos()
    values: Tensor = (low + scale * drawn).to(torch.float32)
    return values.to(dtype)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63
