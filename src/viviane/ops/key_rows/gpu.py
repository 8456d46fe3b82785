"""From keys to rows on a GPU, in one pass; nothing waits for the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.ops.key_rows import HASH, NEVER, RAISE, REPLACE, KeyRules
from viviane.ops.triton_parts.launch import ceil_div, on_device, power_of_two

_TILE = 2048
_WIDEST = 64
_never = tl.constexpr(NEVER)
_raise = tl.constexpr(RAISE)
_replace = tl.constexpr(REPLACE)
_hash = tl.constexpr(HASH)


def key_rows(
    keys: Tensor, rules: KeyRules, columns: Tensor | None = None, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the storage rows of keys, (N, F), and the record of the first key out of range under RAISE."""
    size, features = keys.shape[0], len(rules.columns)
    rows = torch.empty(size, features, dtype=rules.row_dtype, device=keys.device)
    policies = {rule.policy for rule in rules.columns}
    watched = RAISE in policies and rows.numel() > 0
    if kept is not None:
        record, place = kept, kept[3:]
    else:
        record = torch.full((3,), NEVER if watched else 0, dtype=torch.int64, device=keys.device)
        place = record[1:]
    if not rows.numel():
        return rows, record
    wide = min(_WIDEST, power_of_two(features))
    tall = _TILE // wide
    with on_device(keys):
        key_kernel[(ceil_div(size, tall), ceil_div(features, wide))](
            keys, columns, rules.table, rows, place if watched else None, size, features, keys.stride(0),
            keys.stride(1), rules.null_row, hashes=HASH in policies, tall=tall, wide=wide,
        )  # fmt: skip
        if watched:
            record_kernel[(1,)](
                keys, columns, place, record, features, keys.stride(0), keys.stride(1), lasting=kept is not None,
                num_warps=1,
            )  # fmt: skip
    return rows, record


@triton.jit
def mixed(keys):
    """Mix 64 bits, see `viviane.ops.key_rows.mix`."""
    x = keys.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 1).to(tl.int64)


@triton.jit
def hash_rows(keys, base, num_rows, padding):
    """Return the row of each key under HASH; the padding row is left out."""
    others = tl.maximum(num_rows - (padding >= 0).to(tl.int64), 1)
    place = mixed(keys) % others
    return base + place + ((padding >= 0) & (place >= padding)).to(tl.int64)


@triton.jit(do_not_specialize=["size", "features", "null_row"])
def key_kernel(
    keys,
    columns,
    table,
    rows,
    first_place,
    size,
    features,
    key_stride,
    column_stride,
    null_row,
    hashes: tl.constexpr,
    tall: tl.constexpr,
    wide: tl.constexpr,
):
    """Map `tall` samples of `wide` columns; the first key out of range under RAISE lowers `first_place` to its own."""
    n = (tl.program_id(0) * tall + tl.arange(0, tall)).to(tl.int64)[:, None]
    f = tl.program_id(1) * wide + tl.arange(0, wide)
    known = f < features
    here = (n < size) & known[None, :]
    column = f if columns is None else tl.load(columns + f, mask=known, other=0)
    base = tl.load(table + f * 5, mask=known, other=0)[None, :]
    num_rows = tl.load(table + f * 5 + 1, mask=known, other=1)[None, :]
    policy = tl.load(table + f * 5 + 2, mask=known, other=0)[None, :]
    replacement = tl.load(table + f * 5 + 3, mask=known, other=0)[None, :]
    padding = tl.load(table + f * 5 + 4, mask=known, other=-1)[None, :]
    key = tl.load(keys + n * key_stride + column[None, :] * column_stride, mask=here, other=0).to(tl.int64)
    bad = here & ((key < 0) | (key >= num_rows))
    row = tl.where(key == padding, null_row, key + base)
    if tl.max(bad.to(tl.int32)) > 0:
        otherwise = tl.where(policy == _replace, replacement, null_row)
        if hashes:
            otherwise = tl.where(policy == _hash, hash_rows(key, base, num_rows, padding), otherwise)
        row = tl.where(bad, otherwise, row)
        if first_place is not None:
            place = tl.where(bad & (policy == _raise), n * features + f[None, :], _never)
            tl.atomic_min(first_place, tl.min(place))
    tl.store(rows + n * features + f[None, :], row.to(rows.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["features"])
def record_kernel(keys, columns, first_place, record, features, key_stride, column_stride, lasting: tl.constexpr):
    """Complete the record: [1, place, key], or zeros where no key was out of range.

    A lasting record stays as it is where no key was out of range or an earlier call found one, and its place for
    the kernels is made ready for the next call.
    """
    place = tl.load(first_place)
    found = place != _never
    place = tl.where(found, place, 0)
    n, f = place // features, place % features
    column = f if columns is None else tl.load(columns + f)
    key = tl.load(keys + n * key_stride + column * column_stride).to(tl.int64)
    takes = found & (tl.load(record) == 0) if lasting else True
    tl.store(record, found.to(tl.int64), mask=takes)
    tl.store(record + 1, place, mask=takes)
    tl.store(record + 2, tl.where(found, key, 0), mask=takes)
    if lasting:
        tl.store(first_place, _never)
