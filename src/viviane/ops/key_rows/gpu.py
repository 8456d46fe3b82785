"""From keys to rows on a GPU, in one pass; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.key_rows import HASH, NEVER, RAISE, REPLACE, KeyRules, are_trusted
from viviane.ops.triton_parts.addresses import address_of, count_of, odd, pick
from viviane.ops.triton_parts.launch import ceil_div, devices_agree, on_device, power_of_two

_TILE = 2048
_WIDEST = 64
_never = tl.constexpr(NEVER)
_raise = tl.constexpr(RAISE)
_replace = tl.constexpr(REPLACE)
_hash = tl.constexpr(HASH)


def key_rows(
    keys: Tensor,
    rules: KeyRules,
    columns: Tensor | None = None,
    kept: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the storage rows of keys, (N, F), and the record of the first key out of range under RAISE."""
    size, features = keys.shape[0], len(rules.columns)
    rows = torch.empty(size, features, dtype=rules.row_dtype, device=keys.device) if out is None else out
    policies = {rule.policy for rule in rules.columns}
    watched = RAISE in policies and rows.numel() > 0 and not are_trusted()
    record, place = _record(kept, watched, keys.device)
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


def bag_rows(
    keys: Sequence[Tensor],
    offsets: Sequence[Tensor],
    rules: KeyRules,
    kept: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the storage rows of the keys of bags, (N,), their offsets, and the record of the first out of range."""
    if not devices_agree([*keys, *offsets, rules.table]):  # kernels are given addresses alone
        raise VivianeError("the keys of bags, their offsets and their tables must be on one device")
    device, size = offsets[0].device, len(offsets[0]) - 1
    lengths = [len(one) for one in keys]
    rows = torch.empty(sum(lengths), dtype=rules.row_dtype, device=device) if out is None else out
    joined = torch.empty(len(keys) * size + 1, dtype=torch.int64, device=device)
    policies = {rule.policy for rule in rules.columns}
    watched = RAISE in policies and len(rows) > 0 and not are_trusted()
    record, place = _record(kept, watched, device)
    # What no launch reads has any address: that of nothing, zero, would be compiled for.
    keys_at = tuple(address_of(one if len(one) else offsets[0]) for one in keys)
    counts = tuple(map(odd, lengths))
    programs = max(sum(ceil_div(length, _TILE) for length in lengths), len(keys) * ceil_div(size + 1, _TILE))
    with on_device(joined):
        bag_key_kernel[(programs, 2)](
            keys_at, tuple(map(address_of, offsets)), counts, rules.table, rows, joined, place if watched else None,
            size, rules.null_row, hashes=HASH in policies, tile=_TILE,
        )  # fmt: skip
        if watched:
            bag_record_kernel[(1,)](keys_at, counts, place, record, lasting=kept is not None, num_warps=1)
    return rows, joined, record


def _record(kept: Tensor | None, watched: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the record of a call, and the place in it where kernels look for the first offender."""
    if kept is not None:
        return kept, kept[3:]
    if not watched:
        return _nothing_found(device), _nothing_found(device)
    record = torch.full((3,), NEVER, dtype=torch.int64, device=device)
    return record, record[1:]


@cache
def _nothing_found(device: torch.device) -> Tensor:
    """The record of calls that look for nothing; it is never written."""
    return torch.zeros(3, dtype=torch.int64, device=device)


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


@triton.jit
def other_rows(key, base, num_rows, policy, replacement, padding, null_row, hashes: tl.constexpr):
    """Return the rows of keys that are out of range."""
    rows = tl.where(policy == _replace, replacement, null_row)
    if hashes:
        rows = tl.where(policy == _hash, hash_rows(key, base, num_rows, padding), rows)
    return rows


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
        otherwise = other_rows(key, base, num_rows, policy, replacement, padding, null_row, hashes)
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
    _complete(record, first_place, found, place, key, lasting)


@triton.jit
def _complete(record, first_place, found, place, key, lasting: tl.constexpr):
    takes = found & (tl.load(record) == 0) if lasting else True
    tl.store(record, found.to(tl.int64), mask=takes)
    tl.store(record + 1, place, mask=takes)
    tl.store(record + 2, tl.where(found, key, 0), mask=takes)
    if lasting:
        tl.store(first_place, _never)


@triton.jit
def _find(p, counts, per: tl.constexpr):
    """Return the feature whose keys program p takes, where all take `per`, and which of its programs it is.

    Past the last one that is a program whose keys are past the feature's.
    """
    f, within, first = 0, p, 0
    for i in tl.static_range(len(counts)):
        f = tl.where(p >= first, i, f)
        within = tl.where(p >= first, p - first, within)
        first += (count_of(counts, i) + per - 1) // per
    return f, within


@triton.jit
def _start_and_count(counts, f):
    """Return where a feature's keys begin among all, and how many it has."""
    start, count = tl.full([], 0, tl.int64), count_of(counts, 0)
    for i in tl.static_range(len(counts)):
        start += tl.where(i < f, count_of(counts, i), 0)
        count = tl.where(f == i, count_of(counts, i), count)
    return start, count


@triton.jit
def _load_whole(address, n, count):
    """Load numbers of 64 or 32 bits, by the type of the address, those past the count as zeros."""
    wide, base = address & 2, address & -4
    narrow = tl.load(base.to(tl.pointer_type(tl.int32)) + n, mask=n < tl.where(wide == 0, count, 0), other=0)
    whole = tl.load(base.to(tl.pointer_type(tl.int64)) + n, mask=n < tl.where(wide == 0, 0, count), other=0)
    return narrow.to(tl.int64) + whole


@triton.jit
def _map_bags(
    p, keys, counts, table, rows, first_place, null_row, hashes: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    f, within = _find(p, counts, tile)
    start, count = _start_and_count(counts, f)
    base, num_rows = tl.load(table + f * 5), tl.load(table + f * 5 + 1)
    policy, replacement = tl.load(table + f * 5 + 2), tl.load(table + f * 5 + 3)
    padding = tl.load(table + f * 5 + 4)
    n = (within * tile + tl.arange(0, tile)).to(tl.int64)
    here = n < count
    key = _load_whole(pick(keys, f), n, count)
    bad = here & ((key < 0) | (key >= num_rows))
    row = tl.where(key == padding, null_row, key + base)
    if tl.max(bad.to(tl.int32)) > 0:
        row = tl.where(bad, other_rows(key, base, num_rows, policy, replacement, padding, null_row, hashes), row)
        if first_place is not None:
            tl.atomic_min(first_place, tl.min(tl.where(bad, start + n, _never)), mask=policy == _raise)
    tl.store(rows + start + n, row.to(rows.dtype.element_ty), mask=here)


@triton.jit
def _join_offsets(p, offsets, counts, joined, size, tile: tl.constexpr):
    each = (size + tile) // tile
    f = p // each
    b = (p - f * each) * tile + tl.arange(0, tile)
    start, _ = _start_and_count(counts, f)
    # A feature's first offset is the last one of the feature before.
    first, stop = tl.where(f == 0, 0, 1), tl.where(f < len(offsets), size + 1, 0)
    offset = _load_whole(pick(offsets, f), b, stop)
    tl.store(joined + f.to(tl.int64) * size + b, start + offset, mask=(b >= first) & (b < stop))


@triton.jit(do_not_specialize=["size", "null_row"])
def bag_key_kernel(
    keys, offsets, counts, table, rows, joined, first_place, size, null_row, hashes: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    """Map `tile` keys of one feature, or join as many offsets of one: the second grid axis selects it.

    Args:
        keys, offsets: addresses, as `address_of` writes them.
        counts: of keys, as `odd` writes them.
    """
    p = tl.program_id(0)
    if tl.program_id(1) == 0:
        _map_bags(p, keys, counts, table, rows, first_place, null_row, hashes, tile)
    else:
        _join_offsets(p, offsets, counts, joined, size, tile)


@triton.jit
def bag_record_kernel(keys, counts, first_place, record, lasting: tl.constexpr):
    """Complete the record of `bag_key_kernel`, as `record_kernel` does."""
    place = tl.load(first_place)
    found = place != _never
    place = tl.where(found, place, 0)
    f, n = _find(place, counts, 1)
    key = _load_whole(pick(keys, f), n, tl.where(found, n + 1, 0))
    _complete(record, first_place, found, place, key, lasting)
