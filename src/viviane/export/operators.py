"""Lookups in frozen tables as torch operators: one node each in an exported program, with this package's kernels.

    viviane::serving_rows      keys -> rows of a storage, by the policies of the tables
    viviane::serving_find      keys -> rows of a frozen dynamic table
    viviane::serving_gather    rows -> vectors
    viviane::serving_pool      rows of bags -> sums by bag

A program with these operators runs where this module is imported. `viviane.export.plain` computes the same with
standard operators.

Shapes: as in `viviane.export.plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from viviane.core.errors import KeyRangeError
from viviane.export import plain
from viviane.ops.embedding_bag import gather_rows, pool_rows
from viviane.ops.key_rows import ColumnRule, KeyRules, key_rows

_FIELDS = 5


def flat_rules(rules: Sequence[ColumnRule]) -> list[int]:
    """Return rules as the integers that `viviane::serving_rows` accepts: five per column.

    Example:
        >>> flat_rules([ColumnRule(base=10, num_rows=5, policy=0)])
        [10, 5, 0, 0, -1]
    """
    return [n for rule in rules for n in (rule.base, rule.num_rows, rule.policy, rule.replacement, rule.padding)]


@lru_cache(maxsize=256)
def _rules(numbers: tuple[int, ...], null_row: int, device: str) -> KeyRules:
    columns = [ColumnRule(*numbers[i : i + _FIELDS]) for i in range(0, len(numbers), _FIELDS)]
    return KeyRules(columns, null_row, torch.device(device))


@torch.library.custom_op(
    "viviane::serving_rows", mutates_args=(), schema="(Tensor keys, int[] rules, int null_row) -> Tensor"
)
def serving_rows(keys: Tensor, rules: list[int], null_row: int) -> Tensor:
    """Return the storage rows of keys (N, F).

    Raises:
        KeyRangeError: on the CPU, a key is out of range in a table with "raise"; on a GPU it reads zeros.
    """
    known = _rules(tuple(rules), null_row, str(keys.device))
    rows, record = key_rows(keys, known)
    if keys.device.type == "cpu":
        found, place, key = record.tolist()
        if found:
            rule = known.columns[place % len(known.columns)]
            where = f"row {place // len(known.columns)}, column {place % len(known.columns)} of the keys"
            raise KeyRangeError("key out of range", where=where, value=key, allowed=f"0 <= key < {rule.num_rows}")
    return rows


@serving_rows.register_fake
def _(keys: Tensor, rules: list[int], null_row: int) -> Tensor:
    dtype = torch.int32 if null_row + 1 < 2**31 else torch.int64
    return keys.new_empty(keys.shape[0], len(rules) // _FIELDS, dtype=dtype)


@torch.library.custom_op(
    "viviane::serving_find",
    mutates_args=(),
    schema="(Tensor keys, Tensor frozen, Tensor starts, int seed, int width, int absent) -> Tensor",
)
def serving_find(keys: Tensor, frozen: Tensor, starts: Tensor, seed: int, width: int, absent: int) -> Tensor:
    """Return the index of each key (N, F) among frozen keys; `absent` if it does not exist."""
    places, there = plain.find_keys(keys, frozen, starts, seed, width)
    return torch.where(there, places, absent)


@serving_find.register_fake
def _(keys: Tensor, frozen: Tensor, starts: Tensor, seed: int, width: int, absent: int) -> Tensor:
    return torch.empty_like(keys)


def _known(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the rows after checking that all exist: kernels do not check."""
    if rows.device.type != "cpu":
        return rows.clamp(0, len(weight) - 1)
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(weight):
        what = "a row does not exist: a bag may be longer than its feature's max_length"
        raise KeyRangeError(what, value=int(rows.max()), allowed=f"0 <= row < {len(weight)}")
    return rows


@torch.library.custom_op("viviane::serving_gather", mutates_args=(), schema="(Tensor weight, Tensor rows) -> Tensor")
def serving_gather(weight: Tensor, rows: Tensor) -> Tensor:
    """Return the vectors of rows (N, F): (N, F, D), float32.

    Raises:
        KeyRangeError: on the CPU, a row does not exist; on a GPU it reads zeros.
    """
    rows = _known(rows, weight)
    (size, features), dim = rows.shape, weight.shape[1]
    out = torch.empty(size, features * dim, dtype=torch.float32, device=weight.device)
    gather_rows(weight, rows.contiguous(), out, range(0, features * dim, dim))
    return out.view(size, features, dim)


@serving_gather.register_fake
def _(weight: Tensor, rows: Tensor) -> Tensor:
    return weight.new_empty(*rows.shape, weight.shape[1], dtype=torch.float32)


@torch.library.custom_op(
    "viviane::serving_pool",
    mutates_args=(),
    schema="(Tensor weight, Tensor rows, Tensor offsets, Tensor? weights) -> Tensor",
)
def serving_pool(weight: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of rows (N,) by bag, times their weights (N,): (B, D), float32."""
    rows = _known(rows, weight)
    out = torch.empty(len(offsets) - 1, weight.shape[1], dtype=torch.float32, device=weight.device)
    pool_rows(weight, rows.contiguous(), offsets.contiguous(), out, [0], weights)
    return out


@serving_pool.register_fake
def _(weight: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    return weight.new_empty(offsets.shape[0] - 1, weight.shape[1], dtype=torch.float32)
