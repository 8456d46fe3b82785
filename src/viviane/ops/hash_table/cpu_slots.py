"""The slots of an index inside kernels: find a key, grow, remove a key.

A line of 64 bytes holds five slots: five keys, their rows + 1 as int32 (0: empty, so that every key is allowed and
memory that was never written is empty), and how many keys passed the line because it was full. A search reads a whole
line at once, and continues with the next, round the segment's end, only if keys have passed. A segment has L lines.
Linear hashing (Litwin 1980) selects the segment: of n + p segments, n a power of two and p < n those that were split in
the present round,

    segment = bits 31.. of mix(key) mod 2n, less n where that is n + p or more
    line = bits 16.. of mix(key) mod L

One split spreads segment p over p and n + p: growth is a sequence of moves of L lines each, and none moves the whole
table. The lowest 16 bits are left to those who share keys out among processes by the same mix.
"""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

from typing import Final

from numba import int32, int64, njit, uint64

from viviane.ops.native.memory import int32_at, int64_at

# Layout of the head of an index, a vector of int64.
NUM_KEYS: Final = 0
NUM_ROWS: Final = 1
FIRST_FREE: Final = 2  # the freed row that goes out next; `keys` of a freed row is the one after it; -1 ends
NUM_FREE: Final = 3
BASE: Final = 4  # n
SPLIT: Final = 5  # p
SEGMENT_LINES: Final = 6  # L
SEGMENT_BITS: Final = 22  # L is 2 to this power
MAX_SEGMENTS: Final = 7
MAX_ROWS: Final = 8
ORDER: Final = 9
HEAP_SIZE: Final = 10
NUM_ASIDE: Final = 11
NUM_EVICTED: Final = 12
SLOTS: Final = 13  # from here on addresses
SEGMENT_KEYS: Final = 14
SPARE: Final = 15
KEYS: Final = 16
STAMPS: Final = 17
USES: Final = 18  # 0: not kept
HEAP: Final = 19
PLACES: Final = 20
ASIDE: Final = 21
HEAD_SIZE: Final = 23

LINE_BYTES: Final = 64
LINE_SLOTS: Final = 5
SEGMENT_BIT: Final = 31
LINE_BIT: Final = 16
# A round of splits begins at 12/5 keys a line and ends before 16/5.
_BEGIN: Final = 12
_STEP: Final = 4
_SCALE: Final = 5

_LINE_WORDS: Final = 8  # int64
_LINE_HALVES: Final = 16  # int32
_FIRST_ROW: Final = 10
_PASSED: Final = 15


@njit(forceinline=True)
def mix64(x):
    """Mix 64 bits by the finaliser of SplitMix64."""
    x = uint64(x)
    x = uint64(x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = uint64(x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return uint64(x ^ (x >> uint64(31)))


@njit(forceinline=True)
def mixed(key):
    """Return `viviane.ops.key_rows.mix` of a key."""
    return int64(mix64(key) >> uint64(1))


@njit(forceinline=True)
def home_among(base, split, lines, key):
    """Return the line where a key belongs, of base + split segments with `lines` lines each."""
    bits = mixed(key)
    segment = (bits >> SEGMENT_BIT) & (2 * base - 1)
    segment -= base if segment >= base + split else 0
    return segment * lines + ((bits >> LINE_BIT) & (lines - 1))


@njit(forceinline=True)
def home(head, key):
    """Return the line where a key belongs."""
    return home_among(head[BASE], head[SPLIT], head[SEGMENT_LINES], key)


@njit(forceinline=True)
def next_line(line, lines):
    """Return the line after a line, round the end of its segment."""
    return (line & ~(lines - 1)) | ((line + 1) & (lines - 1))


@njit(forceinline=True)
def row_place(line, j):
    """Return the offset of row j of a line, counted in int32."""
    return line * _LINE_HALVES + _FIRST_ROW + j


@njit(forceinline=True)
def slot_of(address, lines, key, line):
    """Return the place of a key's row, counted in int32, searched from its line on; -1 where the key is absent."""
    words, halves = int64_at(address), int32_at(address)
    for _ in range(lines):
        word = line * _LINE_WORDS
        # Selections, not branches: which of the five it is cannot be foreseen.
        j = 4 if words[word + 4] == key else 5
        j = 3 if words[word + 3] == key else j
        j = 2 if words[word + 2] == key else j
        j = 1 if words[word + 1] == key else j
        j = 0 if words[word] == key else j
        # An empty slot may have the key's number, but never before a used one that has it: empty ones fill from front.
        if j < LINE_SLOTS and halves[row_place(line, j)] != 0:
            return row_place(line, j)
        if halves[line * _LINE_HALVES + _PASSED] == 0:
            break
        line = next_line(line, lines)
    return -1


@njit
def put(head, key, row, line):
    """Put an absent key into the first empty slot from its line on; its segment has one."""
    words, halves, lines = int64_at(head[SLOTS]), int32_at(head[SLOTS]), head[SEGMENT_LINES]
    while True:
        for j in range(LINE_SLOTS):
            if halves[row_place(line, j)] == 0:
                words[line * _LINE_WORDS + j] = key
                halves[row_place(line, j)] = int32(row + 1)
                return
        halves[line * _LINE_HALVES + _PASSED] += int32(1)
        line = next_line(line, lines)


@njit
def take_out(head, key, place):
    """Empty the slot of a key, whose row is at `place`."""
    halves, lines = int32_at(head[SLOTS]), head[SEGMENT_LINES]
    halves[place] = 0
    line = home(head, key)
    int64_at(head[SEGMENT_KEYS])[line >> head[SEGMENT_BITS]] -= 1
    head[NUM_KEYS] -= 1
    while line != place // _LINE_HALVES:
        halves[line * _LINE_HALVES + _PASSED] -= int32(1)
        line = next_line(line, lines)


@njit
def split_next(head):
    """Spread the next segment over itself and a new one."""
    lines, base, old = head[SEGMENT_LINES], head[BASE], head[SPLIT]
    words, halves, spare = int64_at(head[SLOTS]), int32_at(head[SLOTS]), int64_at(head[SPARE])
    moved = 0
    for line in range(old * lines, (old + 1) * lines):
        for j in range(LINE_SLOTS):
            row = halves[row_place(line, j)]
            spare[2 * moved] = words[line * _LINE_WORDS + j]
            spare[2 * moved + 1] = row - 1
            moved += int64(row != 0)
            halves[row_place(line, j)] = 0
        halves[line * _LINE_HALVES + _PASSED] = 0
    last = old + 1 == base
    head[SPLIT] = 0 if last else old + 1
    head[BASE] = 2 * base if last else base
    kept = 0
    for i in range(moved):
        line = home(head, spare[2 * i])
        put(head, spare[2 * i], spare[2 * i + 1], line)
        kept += int64(line < (old + 1) * lines)
    counts = int64_at(head[SEGMENT_KEYS])
    counts[old] = kept
    counts[old + base] = moved - kept


@njit(forceinline=True)
def wants_split(head):
    """Whether the keys call for one more split."""
    wanted = _SCALE * head[NUM_KEYS] > (_BEGIN * head[BASE] + _STEP * head[SPLIT]) * head[SEGMENT_LINES]
    return wanted and head[BASE] + head[SPLIT] < head[MAX_SEGMENTS]


@njit
def add(head, key, row):
    """Put an absent key into a slot and grow as far as it takes; False where its segment never has an empty one."""
    counts, bits, most = int64_at(head[SEGMENT_KEYS]), head[SEGMENT_BITS], LINE_SLOTS * head[SEGMENT_LINES]
    while wants_split(head):
        split_next(head)
    line = home(head, key)
    while counts[line >> bits] >= most:
        if head[BASE] + head[SPLIT] >= head[MAX_SEGMENTS]:
            return False
        split_next(head)
        line = home(head, key)
    put(head, key, row, line)
    counts[line >> bits] += 1
    head[NUM_KEYS] += 1
    return True
