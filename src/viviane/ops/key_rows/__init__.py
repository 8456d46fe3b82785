"""From keys to rows of a storage: range check, its policies, padding, in one pass.

Shapes: N keys of a column, F columns, each of one feature. The storage has R rows and after them two that are
always zero: row R means "no key", row R + 1 a missing value that counts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.dispatch import choose, implementation, load

__all__ = [
    "CLEAN",
    "HASH",
    "MOST_BAGS",
    "NEVER",
    "RAISE",
    "REPLACE",
    "SKIP",
    "ColumnRule",
    "KeyRules",
    "are_trusted",
    "bag_rows",
    "hashed",
    "key_rows",
    "lasting_record",
    "mix",
    "trusted_keys",
]

RAISE: Final = 0
REPLACE: Final = 1
HASH: Final = 2
SKIP: Final = 3
NEVER: Final = 2**63 - 1
"""The place of a record without an offender, while kernels look for one."""
MOST_BAGS: Final = 64
"""Features that one call of `bag_rows` takes: a kernel's arguments have little room."""

CLEAN: Final = torch.zeros(3, dtype=torch.int64)
"""The record of a call on the CPU that found no key out of range; it is not written to."""

_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class ColumnRule:
    """How the keys of one column become rows.

    Args:
        base: storage row of the table's key 0.
        num_rows: the table's; keys 0 <= key < num_rows are in range.
        policy: of keys out of range: RAISE reports them and takes row R; REPLACE takes `replacement`; HASH takes
            base + the hash of `viviane.embedding.hash_keys`; SKIP takes row R.
        replacement: storage row.
        padding: key whose row is R, or -1.
    """

    base: int
    num_rows: int
    policy: int
    replacement: int = 0
    padding: int = -1


class KeyRules:
    """The rules of F columns, as tensors on a device.

    Args:
        columns: a rule each.
        null_row: R.
        device: of the keys.
    """

    def __init__(self, columns: Sequence[ColumnRule], null_row: int, device: torch.device) -> None:
        self.columns = tuple(columns)
        self.null_row = null_row
        names = ("base", "num_rows", "policy", "replacement", "padding")
        table = [[getattr(column, name) for name in names] for column in columns]
        self.table = torch.tensor(table, dtype=torch.int64, device=device).view(-1, len(names))
        """(F, 5), int64: base, num_rows, policy, replacement, padding."""
        self.row_dtype = torch.int32 if null_row + 1 < 2**31 else torch.int64


_trust = threading.local()


@contextmanager
def trusted_keys() -> Iterator[None]:
    """Let lookups of this thread report no key: who calls them checks the keys. Keys out of range still read zeros.

    Example:
        >>> with trusted_keys():
        ...     are_trusted()
        True
    """
    before = are_trusted()
    _trust.on = True
    try:
        yield
    finally:
        _trust.on = before


def are_trusted() -> bool:
    """Whether this thread is inside `trusted_keys`."""
    return bool(getattr(_trust, "on", False))


def lasting_record(device: torch.device) -> Tensor:
    """Return an empty record for `key_rows` to keep, (4,), int64: [any, place, key], and a place for the kernels.

    Example:
        >>> lasting_record(torch.device("cpu")).tolist()[:3]
        [0, 0, 0]
    """
    return torch.tensor([0, 0, 0, NEVER], device=device)


def key_rows(
    keys: Tensor,
    rules: KeyRules,
    columns: Tensor | None = None,
    kept: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the storage rows of keys, (N, F), and the record of the first key out of range under RAISE.

    Args:
        keys: (N, C), int32 or int64, any strides.
        rules: of F columns.
        columns: (F,), int64: column of `keys` that each rule is for; None: they are all, in order.
        kept: a `lasting_record`: where it is empty it takes this call's record, else it stays, so that the first
            offender of many calls, such as the replays of a CUDA graph, can be read later.
        out: where the rows go, (N, F), contiguous, of `rules.row_dtype`; None: a new tensor.

    Returns:
        rows, (N, F), contiguous, int32 where the storage allows it, else int64; and (3,), int64, on the keys'
        device: whether a key was out of range, its place n * F + f, the key. The first in that order is reported.
        With `kept` its first three numbers.

    Example:
        >>> rules = KeyRules([ColumnRule(base=10, num_rows=5, policy=SKIP)], null_row=99, device=torch.device("cpu"))
        >>> key_rows(torch.tensor([[4], [5]]), rules)[0].tolist()
        [[14], [99]]
    """
    width = keys.shape[1] if columns is None else len(columns)
    if keys.dim() != 2 or width != len(rules.columns):
        raise VivianeError("one rule per column", value=f"{tuple(keys.shape)}", allowed=f"(N, {len(rules.columns)})")
    if keys.dtype not in (torch.int32, torch.int64):
        raise VivianeError("keys must be whole numbers", value=str(keys.dtype), allowed="int32, int64")
    if out is not None and (out.shape, out.dtype) != ((len(keys), width), rules.row_dtype):
        raise VivianeError("the rows do not fit where they are to go", value=f"{tuple(out.shape)}, {out.dtype}")
    serving = choose(keys.device)
    module = load("key_rows", serving)
    if serving == "gpu":
        rows, record = module.key_rows(keys, rules, columns, kept, out)
        return rows, record[:3]
    rows, record = module.key_rows(keys, rules, columns)
    if kept is not None:
        kept[:3] = torch.where(kept[0] != 0, kept[:3], record)
    return (rows if out is None else out.copy_(rows)), record if kept is None else kept[:3]


def bag_rows(
    keys: Sequence[Tensor],
    offsets: Sequence[Tensor],
    rules: KeyRules,
    kept: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the storage rows of the keys of several features, each with bags, as one list of bags.

    Args:
        keys: of each feature, (N_f,), int32 or int64; at most `MOST_BAGS` features.
        offsets: of each feature's bags, (B + 1,), int32 or int64, from 0 to N_f.
        rules: of one column for each feature.
        kept: as for `key_rows`.
        out: where the rows go, (N,), of `rules.row_dtype`; None: a new tensor.

    Returns:
        rows, (N,), those of the first feature, then of the second, ...; offsets of all bags in them, (F * B + 1,),
        int64; and the record of `key_rows`, whose places count the rows.

    Example:
        >>> rules = KeyRules([ColumnRule(0, 5, SKIP), ColumnRule(10, 5, SKIP)], 99, torch.device("cpu"))
        >>> keys = [torch.tensor([4, 5]), torch.tensor([3])]
        >>> [part.tolist() for part in bag_rows(keys, [torch.tensor([0, 2, 2]), torch.tensor([0, 0, 1])], rules)]
        [[4, 99, 13], [0, 2, 2, 2, 3], [0, 0, 0]]
    """
    if not len(keys) == len(offsets) == len(rules.columns) or not 0 < len(keys) <= MOST_BAGS:
        allowed = f"1 to {MOST_BAGS} features, a rule and offsets each"
        raise VivianeError("the keys of bags do not fit", value=len(keys), allowed=allowed)
    if any(one.dtype not in (torch.int32, torch.int64) for one in (*keys, *offsets)):
        raise VivianeError("keys and offsets must be whole numbers", allowed="int32, int64")
    if any(len(one) != len(offsets[0]) for one in offsets):
        raise VivianeError("features differ in their number of bags", value=[len(one) - 1 for one in offsets])
    if out is not None and (out.shape, out.dtype) != ((sum(map(len, keys)),), rules.row_dtype):
        raise VivianeError("the rows do not fit where they are to go", value=f"{tuple(out.shape)}, {out.dtype}")
    module = implementation("key_rows", offsets[0].device)
    if choose(offsets[0].device) == "gpu":
        flat = [one.contiguous() for one in keys], [one.contiguous() for one in offsets]
        rows, joined, record = module.bag_rows(*flat, rules, kept, out)
        return rows, joined, record[:3]
    rows, joined, record = module.bag_rows(keys, offsets, rules)
    if kept is not None:
        kept[:3] = torch.where(kept[0] != 0, kept[:3], record)
    return (rows if out is None else out.copy_(rows)), joined, record if kept is None else kept[:3]


def mix(keys: Tensor) -> Tensor:
    """Mix 64 bits; with >> shifting in zeros and arithmetic modulo 2^64:

        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = (x ^ (x >> 31)) >> 1

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    x = keys.to(torch.int64)
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return _shift(x ^ _shift(x, 31), 1)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed(keys: Tensor, num_rows: int, padding: int) -> Tensor:
    """Map keys evenly into a table: mix(key) mod num_rows, or into the rows beside the padding row."""
    x = mix(keys)
    if padding < 0:
        return x % num_rows
    x = x % (num_rows - 1)
    return x + (x >= padding)
