"""Hash tables keyed by any 64-bit whole number: which row of a table belongs to which key, and which key goes first.

Shapes: N keys of a call, duplicates allowed, any int64 or int32; U distinct ones; R rows; D numbers a row.

A `KeyIndex` knows keys and rows, not the values: those lie in ordinary tensors (R, D), so that lookups and optimizer
updates are those of `viviane.ops.embedding_bag` and `viviane.ops.row_update`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.dispatch import implementation
from viviane.ops.hash_table.index import (
    Added,
    Inserted,
    KeyIndex,
    Order,
    TableFullError,
    check_keys,
    content_problem,
    stamp_of,
)
from viviane.ops.hash_table.marks import Marks
from viviane.ops.hash_table.reserve import MOST_ROWS, MappedFile, Reserved, reserved, rows_of_disk, rows_of_memory
from viviane.ops.row_update import check_table

__all__ = [
    "Added",
    "Inserted",
    "KeyIndex",
    "MappedFile",
    "Marks",
    "Order",
    "Reserved",
    "TableFullError",
    "check_keys",
    "content_problem",
    "distinct",
    "initial_rows",
    "make_index",
    "make_marks",
    "reserved",
    "rows_of_disk",
    "rows_of_memory",
    "stamp_of",
    "start_rows",
]

LARGEST_SEGMENT = 1 << 14


def make_index(
    max_rows: int,
    *,
    order: Order = "none",
    with_uses: bool = False,
    initial_rows: int = 1,
    segment_lines: int = 1024,
    device: torch.device | str = "cpu",
) -> KeyIndex:
    """Make an empty index of at most `max_rows` keys.

    Args:
        max_rows: most keys at a time; only what is used takes memory.
        order: which key is evicted for a new one when all rows are taken, see `KeyIndex`; "none": no key does.
        with_uses: keep a number of uses for each row; "uses" and "epoch_uses" do so anyway.
        initial_rows: keys that fit before the index grows for the first time.
        segment_lines: lines of five slots that grow at a time, a power of two from 4 to 16,384; over less than 256
            keys are shared out so unevenly that one call may grow the index a lot.
        device: of the keys.

    Example:
        >>> index = make_index(100)
        >>> keys = torch.tensor([7, -1, 7])
        >>> rows = index.find(keys); rows.tolist()
        [-1, -1, -1]
        >>> index.insert(keys, rows, torch.arange(3), stamp_of(0, 1)).rows.tolist()
        [0, 1]
        >>> rows.tolist(), len(index)
        ([0, 1, 0], 2)
    """
    if max_rows < 1 or not 0 < initial_rows <= max_rows:
        raise VivianeError("an index needs at least one row", value=(initial_rows, max_rows))
    if max_rows > MOST_ROWS:
        raise VivianeError("too many rows for one index", value=max_rows, allowed=f"up to {MOST_ROWS:,}")
    if segment_lines & (segment_lines - 1) or not 4 <= segment_lines <= LARGEST_SEGMENT:
        raise VivianeError("segment_lines is a power of two", value=segment_lines, allowed=f"4 to {LARGEST_SEGMENT}")
    uses = with_uses or order in ("uses", "epoch_uses")
    index: KeyIndex = implementation("hash_table", torch.device(device)).Index(
        max_rows, order, uses, initial_rows, segment_lines, torch.device(device)
    )
    return index


def distinct(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct keys in order of their first place, (U,), the index of each key among them, and counts.

    Args:
        keys: (N,), int32 or int64.

    Returns:
        keys (U,), int64; place of each entry's key among them (N,), int64; entries of each (U,), int64.

    Example:
        >>> [part.tolist() for part in distinct(torch.tensor([5, -2, 5]))]
        [[5, -2], [0, 1, 0], [2, 1]]
    """
    check_keys(keys, keys.device)
    found: tuple[Tensor, Tensor, Tensor] = implementation("hash_table", keys.device).distinct(keys)
    return found


def initial_rows(weight: Tensor, rows: Tensor, keys: Tensor, kind: str, a: float, b: float, seed: int) -> None:
    """Give rows values that depend on seed, key and column alone: not on order, rank or device.

    With all whole numbers modulo 2^64, s = 0x9E3779B97F4A7C15 and `mix64` the finaliser of SplitMix64, which is
    `viviane.ops.key_rows.mix` without its last shift:

        x = mix64(mix64(key + seed * s) + (column + 1) * s)
        uniform     w = a + (b - a) * (x >> 40) / 2^24                                 from a to b
        normal      w = a + b * sqrt(-2 ln(((x >> 32) + 1/2) / 2^32)) * cos(2 pi (x mod 2^32) / 2^32)
        constant    w = a

    a, b and b - a are rounded to float32 first, the arithmetic is in float64, the result is rounded to float32 and from
    there to the rows' type. The normal law needs a logarithm and a cosine, whose last bit may differ between machines.

    Args:
        weight: (R, D), contiguous; float32, float16 or bfloat16.
        rows: (U,), int64, distinct, 0 <= row < R.
        keys: (U,), int64.
        kind: "uniform", "normal" or "constant".
        a: lower bound, mean, or value.
        b: upper bound, or standard deviation.
        seed: any whole number; its lower 64 bits count.

    Example:
        >>> weight = torch.zeros(2, 2)
        >>> initial_rows(weight, torch.tensor([1]), torch.tensor([-5]), "constant", 0.5, 0.0, seed=0)
        >>> weight.tolist()
        [[0.0, 0.0], [0.5, 0.5]]
    """
    check_table(weight)
    if kind not in ("uniform", "normal", "constant"):
        raise VivianeError("no such law of initial values", value=kind, allowed="uniform, normal, constant")
    if not (math.isfinite(a) and math.isfinite(b)):
        raise VivianeError("initial values must be finite", value=(a, b))
    if rows.shape != keys.shape or rows.dtype != torch.int64:
        raise VivianeError("one key for each row (int64)", value=f"{tuple(rows.shape)}, {tuple(keys.shape)}")
    check_keys(keys, weight.device)
    implementation("hash_table", weight.device).initial_rows(weight, rows, keys, kind, a, b, seed % 2**64)


def make_marks(device: torch.device | str = "cpu") -> Marks:
    """Make what finds the last entry of each row, for tables on a device.

    Example:
        >>> make_marks("cpu").assign(torch.zeros(1, 1), torch.tensor([0]), torch.ones(1, 1))
    """
    marks: Marks = implementation("hash_table", torch.device(device)).Marks()
    return marks


def start_rows(
    weight: Tensor | None,
    state: Mapping[str, Tensor],
    beginnings: Mapping[str, float],
    keys: Tensor,
    added: Added,
    law: tuple[str, float, float],
    seed: int,
) -> None:
    """Give the rows that `KeyIndex.find_or_insert` added their initial values and state; nothing waits for the device.

    Args:
        weight: (R, D), see `initial_rows`; None leaves values as they are.
        state: optimizer state by name, (R, D) or (R,), float32: at most two and one of these.
        beginnings: the number that each begins with.
        keys: (N,), of the call.
        added: what it returned.
        law: kind, a, b of `initial_rows`.
        seed: of `initial_rows`.
    """
    implementation("hash_table", keys.device).start_rows(
        weight, state, beginnings, added.rows, keys, law, seed % 2**64, added.entries, added.count
    )
