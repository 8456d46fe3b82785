"""The kernels of a row cache on the CPU.

The index is an open-addressing table of int64: 0 is empty, 1 was erased, else the upper 31 bits are a tag of the key
and the lower 32 the row's place plus 2. Of each place `meta` has four int64: key, version, time of last use, slot of
the index.

A writer makes a place's version odd, writes key and row, makes the version even, and then stores the index entry. A
reader takes the version before it copies and compares it afterwards: where the place was given to another row
meanwhile, it searches again. Loads and stores that order the others are atomic; rows are copied in between.
"""

# mypy: ignore-errors
# Types here are Numba's and LLVM's, which a checker of Python cannot see.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types, uint64

from viviane.ops.native.memory import copy_bytes, int64_at, prefetch, primitive, stack_integers, uint8_at

EMPTY = 0
ERASED = 1
FIRST = 2
"""What is added to a place in an index entry."""
META = 4
_KEY, _VERSION, _USED, _SLOT = 0, 1, 2, 3
_AHEAD = 8
"""Keys between asking for an index entry, for the row that it names, and reading the row."""
_RING = 32  # a power of two, above 2 * _AHEAD
_PREFETCHED = 1024
_LOW = 0xFFFFFFFF


@primitive
def _load(typing, address):
    """Return the int64 at an address; later loads stay later."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), build


@primitive
def _store(typing, address, value):
    """Store an int64; earlier stores stay earlier."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@primitive
def _loads_before(typing):
    """Keep earlier loads before later ones. On x86 this costs nothing; a full fence would wait for all stores."""

    def build(context, builder, signature, args):
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), build


@primitive
def _stores_before(typing):
    """Keep earlier stores before later ones."""

    def build(context, builder, signature, args):
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), build


@njit(types.uint64(types.int64), forceinline=True)
def mix(key):
    """Return 64 well mixed bits of a key: splitmix64 (Steele et al. 2014)."""
    bits = uint64(key) + uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> uint64(27))) * uint64(0x94D049BB133111EB)
    return bits ^ (bits >> uint64(31))


@njit(forceinline=True)
def _tag(bits):
    return np.int64(bits >> uint64(33))


@njit(forceinline=True)
def _read(key, bits, mask, index, meta, rows, row_bytes, target, now):
    """Copy the row of a key to an address; return whether it was there."""
    slot = np.int64(bits & uint64(mask))
    tag = _tag(bits)
    while True:
        entry = _load(index + 8 * slot)
        if entry == EMPTY:
            return False
        if entry != ERASED and (entry >> 32) == tag:
            place = (entry & _LOW) - FIRST
            own = meta + 8 * META * place
            version = _load(own + 8 * _VERSION)
            if version & 1 == 0 and int64_at(own)[_KEY] == key:
                copy_bytes(target, rows + place * row_bytes, row_bytes)
                _loads_before()
                if _load(own + 8 * _VERSION) == version:
                    if int64_at(own)[_USED] != now:  # a store takes the line from other readers
                        int64_at(own)[_USED] = now
                    return True
                continue  # the slot was overwritten while it was read
            if _load(index + 8 * slot) != entry:
                continue  # the row has moved
        slot = (slot + 1) & mask


@njit(forceinline=True)
def _ask_for_row(bits, mask, index, meta, rows, row_bytes):
    """Prefetch the row that the first entry for a key names."""
    entry = int64_at(index)[np.int64(bits & uint64(mask))]
    if entry > ERASED and (entry >> 32) == _tag(bits):
        place = (entry & _LOW) - FIRST
        prefetch(meta + 8 * META * place)
        for byte in range(0, min(row_bytes, _PREFETCHED), 64):
            prefetch(rows + place * row_bytes + byte)


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def find(keys, count, mask, index, meta, rows, row_bytes, out, stride, found, now):
    """Copy the rows of keys to `out`, `stride` bytes apart, note which were there, and return how many.

    A pipeline of three steps, `_AHEAD` keys apart: ask for a key's index entry, for its row, copy it.
    """
    hits = 0
    ring = stack_integers(_RING)
    for step in range(count + 2 * _AHEAD):
        if step < count:
            bits = mix(int64_at(keys)[step])
            ring[step & (_RING - 1)] = np.int64(bits)
            prefetch(index + 8 * np.int64(bits & uint64(mask)))
        if _AHEAD <= step < count + _AHEAD:
            _ask_for_row(uint64(ring[(step - _AHEAD) & (_RING - 1)]), mask, index, meta, rows, row_bytes)
        i = step - 2 * _AHEAD
        if i >= 0:
            bits = uint64(ring[i & (_RING - 1)])
            there = _read(int64_at(keys)[i], bits, mask, index, meta, rows, row_bytes, out + i * stride, now)
            uint8_at(found)[i] = there
            hits += there
    return hits


@njit(forceinline=True)
def _slot_of(key, bits, mask, index, meta):
    """Return the slot of a key's entry, or -1 - slot where it would go."""
    slot = np.int64(bits & uint64(mask))
    tag, free = _tag(bits), np.int64(-1)
    while True:
        entry = int64_at(index)[slot]
        if entry == EMPTY:
            return -1 - (slot if free < 0 else free)
        if entry == ERASED:
            if free < 0:
                free = slot
        elif (entry >> 32) == tag and int64_at(meta)[META * ((entry & _LOW) - FIRST) + _KEY] == key:
            return slot
        slot = (slot + 1) & mask


@njit(forceinline=True)
def _give_back(place, ring, state):
    int64_at(ring)[int64_at(state)[1]] = place
    int64_at(state)[1] = (int64_at(state)[1] + 1) % int64_at(state)[5]
    int64_at(state)[2] += 1


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def insert(keys, given, count, mask, index, meta, rows, row_bytes, ring, state, only):
    """Put rows in, as many as there are spare places for; return how many keys were dealt with.

    `ring` holds spare places; of `state` [0] is where the next one is taken, [1] where one is given back, [2] their
    number, [3] the number of keys, [4] of erased entries, [5] the ring's length, [6] the time. `only`: 0 all rows, 1
    those whose key is there, 2 those whose key is not.
    """
    now = int64_at(state)[6]
    for i in range(count):
        key = int64_at(keys)[i]
        bits = mix(key)
        slot = _slot_of(key, bits, mask, index, meta)
        there = slot >= 0
        if (only == 1 and not there) or (only == 2 and there):
            continue
        if int64_at(state)[2] == 0:
            return i
        place = int64_at(ring)[int64_at(state)[0]]
        int64_at(state)[0] = (int64_at(state)[0] + 1) % int64_at(state)[5]
        int64_at(state)[2] -= 1
        own = meta + 8 * META * place
        version = int64_at(own)[_VERSION]
        _store(own + 8 * _VERSION, version + 1)
        _stores_before()
        copy_bytes(rows + place * row_bytes, given + i * row_bytes, row_bytes)
        int64_at(own)[_KEY] = key
        int64_at(own)[_USED] = now
        at = slot if there else -1 - slot
        int64_at(own)[_SLOT] = at
        _store(own + 8 * _VERSION, version + 2)
        before = int64_at(index)[at]
        _store(index + 8 * at, (_tag(bits) << 32) | (place + FIRST))
        if there:
            old = (before & _LOW) - FIRST
            int64_at(meta)[META * old + _SLOT] = -1
            _give_back(old, ring, state)
        else:
            int64_at(state)[3] += 1
            int64_at(state)[4] -= before == ERASED
    return count


@njit(forceinline=True)
def _take_out(slot, place, index, meta, ring, state):
    _store(index + 8 * slot, ERASED)
    int64_at(meta)[META * place + _SLOT] = -1
    _give_back(place, ring, state)
    int64_at(state)[3] -= 1
    int64_at(state)[4] += 1


@njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def erase(keys, count, mask, index, meta, ring, state):
    """Remove keys, and return how many were there."""
    removed = 0
    for i in range(count):
        key = int64_at(keys)[i]
        slot = _slot_of(key, mix(key), mask, index, meta)
        if slot >= 0:
            place = (int64_at(index)[slot] & _LOW) - FIRST
            _take_out(slot, place, index, meta, ring, state)
            removed += 1
    return removed


@njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def evict(places, count, index, meta, ring, state):
    """Remove the rows in some places; returns how many held one."""
    removed = 0
    for i in range(count):
        place = int64_at(places)[i]
        slot = int64_at(meta)[META * place + _SLOT]
        if slot >= 0:
            _take_out(slot, place, index, meta, ring, state)
            removed += 1
    return removed


@njit("void(int64, int64, int64, int64)", nogil=True, cache=True)
def rebuild(num_places, mask, index, meta):
    """Fill an empty index from the places that hold rows; readers still use the old one."""
    for place in range(num_places):
        if int64_at(meta)[META * place + _SLOT] >= 0:
            bits = mix(int64_at(meta)[META * place + _KEY])
            slot = np.int64(bits & uint64(mask))
            while int64_at(index)[slot] != EMPTY:
                slot = (slot + 1) & mask
            int64_at(index)[slot] = (_tag(bits) << 32) | (place + FIRST)
            int64_at(meta)[META * place + _SLOT] = slot
