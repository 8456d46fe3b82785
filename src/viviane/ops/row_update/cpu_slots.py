"""Number the distinct rows of a batch without sorting: equal rows get the same slot.

Each thread walks all entries in order and serves those whose rows it owns; `head[row]` is the slot of a row that was
met before, or -1, and all of `head` is -1 again at the end. Owners follow a hash of the row, so that tables that are
used more than others are shared by all threads. Entries of a row keep their order: sums are the same for any number
of threads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch
from numba import int32, int64, uint64
from torch import Tensor

from viviane.core.errors import VivianeError
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, sources
from viviane.ops.native.memory import int32_at, int64_at, prefetch, read_whole, stack_integers, take_ticket
from viviane.ops.native.pages import empty

if TYPE_CHECKING:
    from viviane.ops.row_update import Scratch

_BLOCK: Final = 256
_AHEAD: Final = 16
_LINE: Final = 16  # int32 of a cache line


@dataclass(frozen=True)
class Slots:
    """The entries of a batch and their slots, by owner. T owners share N entries of U distinct rows.

    Args:
        met: (T * N,), int64: from t * N on, the entries of owner t in order, each entry * 2^32 + slot.
        touched: (T * N,), int64: from t * N on, the row of each slot of owner t.
        counts: 2 T int64: entries, then slots, of each owner.
        stride: N.
        owners: T.
    """

    met: Tensor
    touched: Tensor
    counts: ctypes.Array[ctypes.c_int64]
    stride: int
    owners: int

    @property
    def num_rows(self) -> int:
        """U."""
        return sum(self.counts[self.owners :])


def find_slots(rows: Tensor, first_row: int, num_rows: int, scratch: Scratch, threads: int) -> Slots:
    """Give each distinct row with first_row <= row < first_row + num_rows a slot of its owner."""
    count = rows.numel()
    if count >= 2**31:
        raise VivianeError("too many entries for one update", value=count, allowed="less than 2^31")
    head = scratch.tensors.get("head")
    if head is None or head.numel() < num_rows + _LINE * (threads + 1):
        head = scratch.tensors["head"] = empty(num_rows + _LINE * (threads + 1), torch.int32).fill_(-1)
    met = scratch_view(scratch, "met", threads * count, torch.int64)
    touched = scratch_view(scratch, "touched", threads * count, torch.int64)
    counts = (ctypes.c_int64 * (2 * threads))()
    slot_kernel(rows.element_size(), sources())(
        (rows.data_ptr(), count, first_row, num_rows, head.data_ptr(), met.data_ptr(),
         touched.data_ptr(), ctypes.addressof(counts)),
        tickets=threads, threads=threads,
    )  # fmt: skip
    return Slots(met, touched, counts, count, threads)


def scratch_view(scratch: Scratch, name: str, count: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of at least `count` numbers, with any content, that the scratch keeps."""
    vector = scratch.tensors.get(name)
    if vector is None or vector.numel() < count:
        vector = scratch.tensors[name] = empty(count, dtype)
    return vector


@cache
def slot_kernel(row_size: int, key: str) -> Kernel:
    """Build the kernel that finds slots; a ticket is an owner."""

    @kernel
    def number_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        rows, count, first_row, num_rows = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2], call[OPERANDS + 3]
        head_address, head = call[OPERANDS + 4], int32_at(call[OPERANDS + 4])
        met, touched, counts = int64_at(call[OPERANDS + 5]), int64_at(call[OPERANDS + 6]), int64_at(call[OPERANDS + 7])
        owners = call[1]
        own_rows, own_entries, mine = stack_integers(_BLOCK), stack_integers(_BLOCK), stack_integers(_BLOCK)
        owner = take_ticket(call)
        while owner < owners:
            begin = owner * count
            place, found = begin, 0
            spare = num_rows + _LINE * (owner + 1)
            for block in range(0, count, _BLOCK):
                # No branches, which would be mispredicted half of the time: look at all entries in wide pieces, then
                # write each one, and keep the own ones.
                kept, size = 0, min(_BLOCK, count - block)
                for i in range(size):
                    row = read_whole(rows, block + i, row_size) - first_row
                    hashed = ((row * 0x9E3779B1) & 0xFFFFFFFF) >> 8
                    inside = uint64(row) < uint64(num_rows)
                    mine[i] = int64((((hashed * owners) >> 24) == owner) & inside)
                for i in range(size):
                    own_entries[kept] = block + i
                    kept += mine[i]
                for k in range(kept):
                    own_rows[k] = read_whole(rows, own_entries[k], row_size) - first_row
                for k in range(kept):
                    prefetch(head_address + 4 * own_rows[k])
                for k in range(kept):
                    row = own_rows[k]
                    slot = int64(head[row])
                    new = slot < 0
                    slot = found if new else slot
                    # Only what is new is written into a row's place, which shares its cache line with other owners'
                    # rows: a line that all of them wrote to would wander between their caches.
                    head[row if new else spare] = int32(slot)
                    touched[begin + found] = row
                    met[place] = (own_entries[k] << 32) + slot
                    found += int64(new)
                    place += 1
            for i in range(begin, begin + found):
                prefetch(head_address + 4 * touched[min(i + _AHEAD, begin + found - 1)])
                head[touched[i]] = -1
            head[spare] = -1
            counts[owner] = place - begin
            counts[owners + owner] = found
            owner = take_ticket(call)

    return number_rows
