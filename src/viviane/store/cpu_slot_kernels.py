"""Kernels of `viviane.store.slots`: find the slots of a batch's rows, choose slots to take, hand them out.

Arrays: `slot_of` has for each row its slot + 1, 0, or -t where batch t took its slot and wrote the row back.
`marks` has for each slot 2 * stamp + 1, and 2 * stamp once the clock's hand has passed it; 0: free for any row.
"""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

import numba
import numpy as np

from viviane.ops.native.memory import int32_at, int64_at, prefetch

_AHEAD = 40
_BLOCK = 1024
_FEW_TABLES = 64
_MOST_BITS = 12


@numba.njit(nogil=True, cache=True)
def find_slots(rows, slots, slot_of, marks, low, high, mark, bounds, absent, counts):
    """Write the slots of entries low <= n < high and mark them as used; list the entries that have none, by table.

    Both loops are without branches on what they read: one row in ten is absent, and processors guess wrong as often.

    Args:
        slots: (N,), the result; negative where a row has no slot.
        slot_of, marks: addresses of the arrays; before `marks` stands a number that may be overwritten.
        absent: (N,); entries of this range without a slot go to absent[low:], those of the first table first.
        counts: (T,); how many of each table.
    """
    counts[:] = 0
    missing = low
    given, noted = int32_at(slot_of), int64_at(marks - 8)
    for start in range(low, high, _BLOCK):  # a block stays in the first cache between the loops
        stop = min(start + _BLOCK, high)
        for n in range(start, stop):
            prefetch(slot_of + rows[min(n + _AHEAD, high - 1)] * 4)
            slots[n] = given[rows[n]] - 1
        for n in range(start, stop):
            prefetch(marks + slots[min(n + _AHEAD, stop - 1)] * 8)
            absent[missing] = n
            missing += slots[n] < 0
            noted[max(slots[n] + 1, 0)] = mark
    if len(counts) == 1:
        counts[0] = missing - low
        return
    for i in range(low, missing):
        counts[_table(rows[absent[i]], bounds)] += 1
    _group_by_table(rows, absent[low:missing], bounds, counts)


@numba.njit(nogil=True, cache=True)
def _table(row, bounds):
    """Return which table a row is of."""
    if len(bounds) > _FEW_TABLES:
        return np.searchsorted(bounds, row, side="right") - 1
    t = -1
    for bound in bounds:
        t += row >= bound
    return t


@numba.njit(nogil=True, cache=True)
def _group_by_table(rows, absent, bounds, counts):
    entries = absent.copy()
    places = np.empty(len(counts), np.int64)
    total = 0
    for t in range(len(counts)):
        places[t] = total
        total += counts[t]
    for n in entries:
        t = _table(rows[n], bounds)
        absent[places[t]] = n
        places[t] += 1


@numba.njit(nogil=True, cache=True)
def _digit_bits(largest):
    """Return how many bits a pass of a sort takes, so that all passes take as many, at most 12."""
    bits = 1
    while largest >> bits:
        bits += 1
    passes = -(-bits // _MOST_BITS)
    return -(-bits // passes)


@numba.njit(nogil=True, cache=True)
def _sort_keys(keys, other, largest):
    """Sort keys from 0 to `largest` by their digits; return whether they ended in `other`."""
    swapped, shift, bits = False, 0, _digit_bits(largest)
    places, mask = np.empty(1 << bits, np.int64), (1 << bits) - 1
    while largest >> shift:
        _begin_buckets(keys, shift, places)
        for key in keys:
            bucket = (key >> shift) & mask
            other[places[bucket]] = key
            places[bucket] += 1
        keys, other = other, keys
        swapped = not swapped
        shift += bits
    return swapped


@numba.njit(nogil=True, cache=True)
def _sort_pairs(keys, values, other_keys, other_values, largest):
    """Sort pairs by key, as `_sort_keys` does."""
    swapped, shift, bits = False, 0, _digit_bits(largest)
    places, mask = np.empty(1 << bits, np.int64), (1 << bits) - 1
    while largest >> shift:
        _begin_buckets(keys, shift, places)
        for i in range(len(keys)):
            bucket = (keys[i] >> shift) & mask
            at = places[bucket]
            other_keys[at], other_values[at] = keys[i], values[i]
            places[bucket] = at + 1
        keys, other_keys = other_keys, keys
        values, other_values = other_values, values
        swapped = not swapped
        shift += bits
    return swapped


@numba.njit(nogil=True, cache=True)
def _begin_buckets(keys, shift, places):
    places[:] = 0
    mask = len(places) - 1
    for key in keys:
        places[(key >> shift) & mask] += 1
    total = 0
    for b in range(len(places)):
        size = places[b]
        places[b] = total
        total += size


@numba.njit(nogil=True, cache=True)
def choose_slots(
    rows, absent, pieces, first_row, num_rows, first_slot, num_slots, hand, guard, mark, owner, marks, room
):  # fmt: skip
    """List the distinct absent rows of one table and as many slots to take, both in the order of rows.

    Args:
        pieces: (P, 2), where the table's entries stand in `absent`: start and length of each piece.
        hand: of the table's clock.
        guard: slots with marks from 2 * guard on are in use.
        room: (5, M), M at least the number of entries; on return [0] has the rows, [1] the slots.

    Returns:
        the number of distinct rows; the hand; -1 for the number if too few slots are free, then the hand is the number.
    """
    count = 0
    for p in range(len(pieces)):
        for i in range(pieces[p, 0], pieces[p, 0] + pieces[p, 1]):
            room[0, count] = rows[absent[i]] - first_row
            count += 1
    if _sort_keys(room[0, :count], room[1, :count], num_rows - 1):
        room[0, :count] = room[1, :count]
    distinct = 0
    for i in range(count):
        if i == 0 or room[0, i] != room[0, distinct - 1]:
            room[0, distinct] = room[0, i]
            distinct += 1
    taken, step, most = 0, 0, 2 * num_slots
    while taken < distinct and step < most:
        slot = first_slot + hand
        own = marks[slot]
        if own < 2 * guard or own == 0:
            if own & 1:
                marks[slot] = own - 1
            else:
                marks[slot] = mark
                room[1, taken] = slot
                room[2, taken] = owner[slot] - first_row if owner[slot] >= 0 else 0
                taken += 1
        step += 1
        hand = hand + 1 if hand + 1 < num_slots else 0
    if taken < distinct:
        for i in range(taken):
            marks[room[1, i]] = 0
        return -1, distinct
    if _sort_pairs(room[2, :distinct], room[1, :distinct], room[3, :distinct], room[4, :distinct], num_rows - 1):
        room[1, :distinct] = room[4, :distinct]
    return distinct, hand


@numba.njit(nogil=True, cache=True)
def give_slots(rows, absent, pieces, first_row, slots, slot_of, owner, dirty, room, ticket, new_rows, new_slots,
               old_rows, old_dirty, left):  # fmt: skip
    """Hand the chosen slots to the rows, note what they held, and write the slots of the entries.

    Args:
        room: what `choose_slots` left.
        ticket: of this batch; rows that lose a changed slot get -ticket.
        new_rows, new_slots, old_rows, old_dirty: (M,), as in `viviane.store.slots.Admission`.
        left: (M,), the ticket of the batch that wrote the row back, or 0.
    """
    for i in range(len(new_rows)):
        row, slot = room[0, i] + first_row, room[1, i]
        old = owner[slot]
        is_dirty = old >= 0 and dirty[slot]
        new_rows[i], new_slots[i], old_rows[i], old_dirty[i] = row, slot, old, is_dirty
        if old >= 0:
            slot_of[old] = -ticket if is_dirty else 0
        left[i] = -slot_of[row]
        owner[slot], dirty[slot] = row, False
        slot_of[row] = slot + 1
    for p in range(len(pieces)):
        for i in range(pieces[p, 0], pieces[p, 0] + pieces[p, 1]):
            n = absent[i]
            slots[n] = slot_of[rows[n]] - 1
