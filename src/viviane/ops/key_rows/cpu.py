"""From keys to rows on the CPU, in one pass: a sample whose keys are all in range takes no branches."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final
from weakref import WeakKeyDictionary

import torch
from numba import int64, njit, uint64
from torch import Tensor

from viviane.ops.key_rows import CLEAN, HASH, RAISE, REPLACE, KeyRules
from viviane.ops.key_rows.reference import bag_rows
from viviane.ops.native.kernels import OPERANDS, Kernel, PreparedKernel, kernel, num_threads, sources
from viviane.ops.native.memory import int64_at, lower_to, read_whole, take_ticket, write_whole

__all__ = ["SmallKeyRows", "bag_rows", "key_rows"]

_NEVER: Final = 2**63 - 1
_BLOCKS_PER_THREAD = 4
_tables: WeakKeyDictionary[KeyRules, Tensor] = WeakKeyDictionary()
"""Each rules' table as columns (5, F), which the kernel reads in wide pieces."""


def key_rows(keys: Tensor, rules: KeyRules, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the storage rows of keys, (N, F), and the record of the first key out of range under RAISE."""
    size, features = keys.shape[0], len(rules.columns)
    rows = torch.empty(size, features, dtype=rules.row_dtype)
    if not size or not features:
        return rows, CLEAN
    table = _tables.get(rules)
    if table is None:
        table = _tables[rules] = rules.table.t().contiguous()
    stride, step = keys.stride()
    together = columns is None and step == 1
    chosen = None if together else torch.arange(features) if columns is None else columns.contiguous()
    first_wrong = ctypes.c_int64(_NEVER)
    threads = num_threads(size * features)
    key_kernel(keys.element_size(), rows.element_size(), together, sources())(
        (keys.data_ptr(), stride, step, 0 if chosen is None else chosen.data_ptr(), table.data_ptr(), rows.data_ptr(),
         size, features, rules.null_row, ctypes.addressof(first_wrong)),
        tickets=min(size, threads * _BLOCKS_PER_THREAD), threads=threads,
    )  # fmt: skip
    place = first_wrong.value
    if place == _NEVER:
        return rows, CLEAN
    column = place % features if chosen is None else int(chosen[place % features])
    return rows, torch.tensor([1, place, int(keys[place // features, column])])


class SmallKeyRows:
    """`key_rows` of batches of one shape, one after the other, in one thread: what stays is prepared.

    Args:
        rules: of F columns.
        columns: as of `key_rows`.
        size: N.
        width: C, the columns of the keys.
        dtype: of the keys.

    Attributes:
        rows: of the last batch, (N, F).
    """

    def __init__(self, rules: KeyRules, columns: Tensor | None, size: int, width: int, dtype: torch.dtype) -> None:
        self.rows = torch.empty(size, len(rules.columns), dtype=rules.row_dtype)
        self._kept = rules, columns, rules.table.t().contiguous()
        self._first_wrong = ctypes.c_int64(_NEVER)
        run = key_kernel(dtype.itemsize, self.rows.element_size(), columns is None, sources())
        self._run = PreparedKernel(run, (
            0, width, 1, 0 if columns is None else columns.data_ptr(), self._kept[2].data_ptr(), self.rows.data_ptr(),
            size, len(rules.columns), rules.null_row, ctypes.addressof(self._first_wrong),
        ))  # fmt: skip

    def find(self, keys: Tensor) -> bool:
        """Find the rows of keys, (N, C), contiguous; False: a key is out of range under RAISE."""
        self._first_wrong.value = _NEVER
        self._run.set(0, keys.data_ptr())
        self._run.run()
        return self._first_wrong.value == _NEVER


@njit(forceinline=True)
def mixed(key):  # type: ignore[no-untyped-def]
    """Mix 64 bits, see `viviane.ops.key_rows.mix`."""
    x = uint64(key)
    x = uint64(x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = uint64(x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return int64(uint64(x ^ (x >> uint64(31))) >> uint64(1))


@njit(forceinline=True)
def row_out_of_range(key, f, features, table, null_row):  # type: ignore[no-untyped-def]
    """Return the row of a key out of range by its column's policy."""
    policy = table[2 * features + f]
    if policy == REPLACE:
        return table[3 * features + f]
    if policy == HASH:
        base, num_rows, padding = table[f], table[features + f], table[4 * features + f]
        if padding < 0:
            return base + mixed(key) % num_rows
        place = mixed(key) % (num_rows - 1)
        return base + place + int64(place >= padding)
    return null_row


@cache
def key_kernel(key_size: int, row_size: int, together: bool, key: str) -> Kernel:
    """Build the kernel; `together`: the keys of a sample are side by side, in the order of the rules."""

    @kernel
    def rows_of_keys(call):  # type: ignore[no-untyped-def]
        _ = key
        keys, stride, step = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2]
        columns, table, rows = int64_at(call[OPERANDS + 3]), int64_at(call[OPERANDS + 4]), call[OPERANDS + 5]
        size, features, null_row = call[OPERANDS + 6], call[OPERANDS + 7], call[OPERANDS + 8]
        first_wrong, blocks = int64_at(call[OPERANDS + 9]), call[1]
        block = take_ticket(call)
        while block < blocks:
            for n in range(size * block // blocks, size * (block + 1) // blocks):
                wrong = 0
                for f in range(features):
                    own = read_whole(keys, n * stride + (f if together else columns[f] * step), key_size)
                    wrong |= int64(uint64(own) >= uint64(table[features + f]))
                    row = null_row if own == table[4 * features + f] else own + table[f]
                    write_whole(rows, n * features + f, row, row_size)
                if wrong != 0:
                    for f in range(features):
                        own = read_whole(keys, n * stride + (f if together else columns[f] * step), key_size)
                        if uint64(own) >= uint64(table[features + f]):
                            row = row_out_of_range(own, f, features, table, null_row)
                            write_whole(rows, n * features + f, row, row_size)
                            if table[2 * features + f] == RAISE:
                                lower_to(first_wrong, n * features + f)
            block = take_ticket(call)

    return rows_of_keys
