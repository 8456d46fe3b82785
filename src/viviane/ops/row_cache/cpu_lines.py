"""The writer's copy of a GPU cache's index: which place each key has, and which lines a change has touched."""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

import numpy as np
from numba import njit, uint64

_LOW = 0xFFFFFFFF
_ENTRIES = 7
_WORDS = 8
DONE, TOUCHED, RETIRED, ADDED = 0, 1, 2, 3
"""What `assign` counts: keys dealt with, lines touched, places retired, keys added."""


@njit(forceinline=True)
def _mix(key, table):
    """Return the hash of a key of a table, as the GPU's kernels compute it."""
    bits = uint64(key) ^ ((uint64(table) + uint64(1)) * uint64(0x9E3779B97F4A7C15))
    bits = (bits ^ (bits >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> uint64(27))) * uint64(0x94D049BB133111EB)
    return bits ^ (bits >> uint64(31))


@njit(forceinline=True)
def _locate(key, table, lines, place_keys, place_tables):
    """Return where the entry of a key is, or -1, and its home line."""
    bits = _mix(key, table)
    num_lines = len(lines)
    line = np.int64(bits & uint64(num_lines - 1))
    home, tag = line, np.int64(bits >> uint64(33))
    while True:
        for j in range(1, _ENTRIES + 1):
            entry = lines[line, j]
            if entry != 0 and (entry >> 32) == tag:
                place = (entry & _LOW) - 1
                if place_keys[place] == key and place_tables[place] == table:
                    return _WORDS * line + j, home, tag
        if lines[line, 0] == 0:
            return np.int64(-1), home, tag
        line = (line + 1) & (num_lines - 1)


@njit("int64[:](int64[::1], int32[::1], int64[:, ::1], int64[::1], int32[::1])", nogil=True, cache=True)
def locate(keys, tables, lines, place_keys, place_tables):
    """Return the place of each key, or -1."""
    found = np.full(len(keys), -1, np.int64)
    for i in range(len(keys)):
        at, _, _ = _locate(keys[i], tables[i], lines, place_keys, place_tables)
        if at >= 0:
            found[i] = (lines[at // _WORDS, at % _WORDS] & _LOW) - 1
    return found


@njit(forceinline=True)
def _touch(line, marks, touched, counts):
    if marks[line] == 0:
        marks[line] = 1
        touched[counts[TOUCHED]] = line
        counts[TOUCHED] += 1


@njit(
    "void(int64[::1], int32[::1], int64[::1], int64[:, ::1], int64[::1], int32[::1], int64[::1], uint8[::1],"
    " int64[::1], int64[::1], int64[::1])",
    nogil=True, cache=True,
)  # fmt: skip
def assign(keys, tables, places, lines, place_keys, place_tables, place_at, marks, touched, retired, counts):
    """Give distinct keys new places; the entries of those that had one are changed, others get entries.

    `counts` says what was done; `touched` has room for every line, and `marks`, all 0, says which are in it.
    """
    for i in range(len(keys)):
        key, table, place = keys[i], tables[i], places[i]
        at, home, tag = _locate(key, table, lines, place_keys, place_tables)
        if at >= 0:
            old = (lines[at // _WORDS, at % _WORDS] & _LOW) - 1
            retired[counts[RETIRED]] = old
            counts[RETIRED] += 1
            place_at[old] = -1
        else:
            line, slot = home, 0
            while slot == 0:
                for j in range(1, _ENTRIES + 1):
                    if lines[line, j] == 0:
                        slot = j
                        break
                if slot == 0:
                    lines[line, 0] += 1
                    _touch(line, marks, touched, counts)
                    line = (line + 1) & (len(lines) - 1)
            at = _WORDS * line + slot
            counts[ADDED] += 1
        lines[at // _WORDS, at % _WORDS] = (tag << 32) | (place + 1)
        _touch(at // _WORDS, marks, touched, counts)
        place_keys[place], place_tables[place], place_at[place] = key, table, at
        counts[DONE] += 1


@njit(
    "void(int64[::1], int64[:, ::1], int64[::1], int32[::1], int64[::1], uint8[::1], int64[::1], int64[::1])",
    nogil=True, cache=True,
)  # fmt: skip
def remove(places, lines, place_keys, place_tables, place_at, marks, touched, counts):
    """Take the entries of places out of the index."""
    for i in range(len(places)):
        place = places[i]
        at = place_at[place]
        if at < 0:
            continue
        line = np.int64(_mix(place_keys[place], place_tables[place]) & uint64(len(lines) - 1))
        while line != at // _WORDS:
            lines[line, 0] -= 1
            _touch(line, marks, touched, counts)
            line = (line + 1) & (len(lines) - 1)
        lines[line, at % _WORDS] = 0
        _touch(line, marks, touched, counts)
        place_at[place] = -1
        counts[DONE] += 1
