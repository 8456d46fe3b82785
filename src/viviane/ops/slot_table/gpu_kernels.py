"""Kernels of `viviane.ops.slot_table.gpu`: find slots, list wanted rows, choose slots to take, move rows.

The set of places that are wanted is bits: those of a table begin at a word of their own, and 1,024 words are a block. A
prefix sum of the blocks' counts turns it into a rising list, so that nothing is sorted.
"""

import triton
import triton.language as tl


@triton.jit
def _ones(word):
    """Return how many bits of 32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _set_bit(words, bit, mask):
    tl.atomic_or(words + (bit >> 5), (1 << (bit & 31)).to(tl.int32), mask=mask, sem="relaxed")


@triton.jit
def _cooled(heat, age, half_life: tl.constexpr):
    """Return heat after a number of batches: halved each half-life, in a line between."""
    halvings = tl.maximum(tl.minimum(age // half_life, 31), 0)
    return ((heat >> halvings) * (2 * half_life - age % half_life)) // (2 * half_life)


@triton.jit
def _note_use(used, heat, slot, here, stamp, one: tl.constexpr, half_life: tl.constexpr, block: tl.constexpr):
    """Note a batch's use of slots, and warm each once."""
    last = tl.load(used + slot, mask=here, other=0)
    first = here & (last < stamp)  # repeated rows read the cache for most of their entries
    last = tl.atomic_max(used + slot, tl.full([block], 0, tl.int32) + stamp, mask=first, sem="relaxed")
    first = first & (last < stamp)
    before = tl.load(heat + slot, mask=first, other=0)
    tl.store(heat + slot, _cooled(before, stamp - last, half_life) + one, mask=first)


@triton.jit(do_not_specialize=["stamp", "guard", "count", "num_tables"])
def find_kernel(
    rows, slots, slot_of, used, heat, wanted, counts, first_rows, first_bits, clock, stamp, guard, count, num_tables,
    one: tl.constexpr, half_life: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the slots that rows have, note their use, and collect the places of rows that have none.

    Stamp and guard go to `clock` for the kernels that follow, which may be recorded in a CUDA graph.
    """
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = n < count
    row = tl.load(rows + n, mask=here, other=0).to(tl.int64)
    slot = tl.load(slot_of + row, mask=here, other=1) - 1
    tl.store(slots + n, slot.to(slots.dtype.element_ty), mask=here)
    _note_use(used, heat, slot, here & (slot >= 0), stamp, one, half_life, block)
    absent = here & (slot < 0)
    number = tl.sum(absent.to(tl.int32), 0)
    if number > 0:
        shift = tl.full([block], 0, tl.int64)
        for t in range(num_tables):
            first = tl.load(first_rows + t)
            shift = tl.where(row >= first, tl.load(first_bits + t) - first, shift)
        _set_bit(wanted, shift - slot - 2, absent)  # of a row without a slot, slot_of - 1 is -2 - its place
        tl.atomic_add(counts + 1, number.to(tl.int64), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.atomic_add(counts, tl.full([], 0, tl.int64) + count, sem="relaxed")
        tl.store(clock, tl.full([], 0, tl.int32) + stamp)
        tl.store(clock + 1, tl.full([], 0, tl.int32) + guard)


@triton.jit
def count_bits_kernel(words, found, block: tl.constexpr):
    """Write how many bits of a block are set."""
    at = tl.program_id(0).to(tl.int64)
    word = tl.load(words + at * block + tl.arange(0, block)).to(tl.uint32, bitcast=True)
    tl.store(found + at, tl.sum(_ones(word), 0))


@triton.jit
def _age(owner, used, heat, slot, here, stamp, guard, ages: tl.constexpr, half_life: tl.constexpr):
    """Return the class of slots; 0 for those in use, and for what is no slot."""
    last = tl.load(used + slot, mask=here, other=0)
    warmth = _cooled(tl.load(heat + slot, mask=here, other=0), stamp - last, half_life).to(tl.float32)
    # The bits of a float are its logarithm: 32 classes for each doubling, from 128 on.
    level = (warmth.to(tl.int32, bitcast=True) >> 18) - ((127 + 7) << 5)
    age = (ages - 2) - tl.minimum(tl.maximum(level, 0), ages - 3)
    age = tl.where(last >= guard, 0, age)
    age = tl.where(tl.load(owner + slot, mask=here, other=0) < 0, ages - 1, age)
    return tl.where(here, age, 0)


@triton.jit
def count_ages_kernel(
    blocks, owner, used, heat, found, classes, clock, ages: tl.constexpr, half_life: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Write the age of each slot of a block, and add their numbers to those of its table, (T, ages)."""
    at = blocks + tl.program_id(0) * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    j = tl.arange(0, block)
    stamp, guard = tl.load(clock), tl.load(clock + 1)
    age = _age(owner, used, heat, first + j, j < count, stamp, guard, ages, half_life)
    tl.store(classes + first + j, age.to(tl.uint8), mask=j < count)
    number = tl.arange(0, ages)
    total = tl.histogram(age, ages)
    total = tl.where(number == 0, total - (block - count).to(tl.int32), total)
    tl.atomic_add(found + table * ages + number, total, mask=total > 0, sem="relaxed")


@triton.jit
def choose_ages_kernel(found, wanted_stops, first_blocks, limits, needs, ages: tl.constexpr):
    """Choose from which age on a table's slots are taken.

    Writes to `limits`, (T, 4): the age; how many of exactly this age; how many free ones; whether there are enough. And
    to `needs`, (T, 2), how many rows have no slot, and how many slots are in use.
    """
    t = tl.program_id(0)
    first, last = tl.load(first_blocks + t), tl.load(first_blocks + t + 1)
    need = tl.load(wanted_stops + last - 1, mask=last > 0, other=0)
    need -= tl.load(wanted_stops + first - 1, mask=first > 0, other=0)
    number = tl.arange(0, ages)
    own = tl.load(found + t * ages + number)
    in_use = tl.sum(tl.where(number == 0, own, 0), 0)
    own = tl.where(number == 0, 0, own)
    total = tl.sum(own, 0)
    from_here = total - tl.cumsum(own, 0) + own
    age = tl.max(tl.where((from_here >= need) & (number > 0), number, 0), 0)
    above = tl.sum(tl.where(number > age, own, 0), 0)
    free = tl.sum(tl.where(number == ages - 1, own, 0), 0)
    tl.store(limits + t * 4, age)
    tl.store(limits + t * 4 + 1, need - above)
    tl.store(limits + t * 4 + 2, tl.minimum(need, free))
    tl.store(limits + t * 4 + 3, (total >= need).to(tl.int32))
    tl.store(needs + t * 2, need)
    tl.store(needs + t * 2 + 1, in_use)


@triton.jit(do_not_specialize=["num_tables"])
def report_kernel(limits, needs, starts, report, num_tables, block: tl.constexpr):
    """Write where tables begin among the new rows, and what the host asks for."""
    t = tl.arange(0, block)
    here = t < num_tables
    need = tl.load(needs + t * 2, mask=here, other=0)
    fits = tl.load(limits + t * 4 + 3, mask=here, other=1)
    stop = tl.cumsum(need, 0)
    tl.store(starts + t, (stop - need).to(tl.int64), mask=here)
    tl.store(starts + num_tables, tl.sum(need, 0).to(tl.int64))
    tl.store(report, tl.min(fits, 0).to(tl.int64))
    tl.store(report + 1, tl.sum(need, 0).to(tl.int64))
    tl.store(report + 2 + t, need.to(tl.int64), mask=here)
    tl.store(report + 2 + num_tables + t, tl.load(needs + t * 2 + 1, mask=here, other=0).to(tl.int64), mask=here)


@triton.jit
def _kinds(age, chosen, ages: tl.constexpr):
    """Return as 0 or 1 whether slots are free, are older than the chosen age, or are of exactly this age."""
    is_free = age == ages - 1
    return is_free.to(tl.int32), ((age > chosen) & ~is_free).to(tl.int32), ((age == chosen) & (age > 0)).to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks"])
def count_slots_kernel(blocks, classes, limits, found, num_blocks, ages: tl.constexpr, block: tl.constexpr):
    """Write of each block how many slots are free, are older than the chosen age, and are of this age: (3, B)."""
    b = tl.program_id(0)
    at = blocks + b * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    j = tl.arange(0, block)
    age = tl.load(classes + first + j, mask=j < count, other=0).to(tl.int32)
    is_free, is_older, is_tie = _kinds(age, tl.load(limits + table * 4), ages)
    tl.store(found + b, tl.sum(is_free, 0))
    tl.store(found + num_blocks + b, tl.sum(is_older, 0))
    tl.store(found + 2 * num_blocks + b, tl.sum(is_tie, 0))


@triton.jit
def _ranks(flags, stops, b, first):
    """Return how many slots of a kind stand before each of a block, in the blocks from `first` on."""
    before = tl.load(stops + b - 1, mask=b > 0, other=0) - tl.load(stops + first - 1, mask=first > 0, other=0)
    return before + tl.cumsum(flags, 0) - flags


@triton.jit(do_not_specialize=["num_blocks"])
def take_slots_kernel(
    blocks, first_blocks, owner, classes, limits, needs, stops, starts, report, new_slots, old_rows, num_blocks,
    ages: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """List the slots to take with the rows that lose them: free ones, older ones, then some of the chosen age."""
    if tl.load(report) == 0:
        return
    b = tl.program_id(0)
    at = blocks + b * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    first_block = tl.load(first_blocks + table)
    slot = first + tl.arange(0, block)
    here = tl.arange(0, block) < count
    age = tl.load(classes + slot, mask=here, other=0).to(tl.int32)
    is_free, is_older, is_tie = _kinds(age, tl.load(limits + table * 4), ages)
    ties, free, need = tl.load(limits + table * 4 + 1), tl.load(limits + table * 4 + 2), tl.load(needs + table * 2)
    free_rank = _ranks(is_free, stops, b, first_block)
    older_rank = _ranks(is_older, stops + num_blocks, b, first_block)
    tie_rank = _ranks(is_tie, stops + 2 * num_blocks, b, first_block)
    takes_free = (is_free > 0) & (free_rank < free)
    takes_tie = (is_free == 0) & (is_tie > 0) & (tie_rank < ties)
    rank = tl.where(takes_free, free_rank, tl.where(takes_tie, need - ties + tie_rank, free + older_rank))
    taken = takes_free | takes_tie | (is_older > 0)
    place = tl.load(starts + table) + rank
    tl.store(new_slots + place, slot.to(tl.int64), mask=taken)
    row = tl.load(owner + slot, mask=taken & (is_free == 0), other=-1)
    tl.store(old_rows + place, row, mask=taken)


@triton.jit
def list_places_kernel(words, blocks, stops, report, row_at, places, rows, block: tl.constexpr):
    """List the places of a set in their order, with the rows that are there; empty the set."""
    b = tl.program_id(0).to(tl.int64)
    w = b * block + tl.arange(0, block)
    stop = tl.load(stops + b)
    before = tl.load(stops + b - 1, mask=b > 0, other=0)
    if stop == before:
        return
    word = tl.load(words + w).to(tl.uint32, bitcast=True)
    tl.store(words + w, tl.full([block], 0, tl.int32))
    if tl.load(report) == 0:
        return
    ones = _ones(word)
    at = (before + tl.cumsum(ones, 0) - ones).to(tl.int64)
    first = tl.load(blocks + b * 3 + 1) + tl.arange(0, block).to(tl.int64) * 32
    for _ in range(tl.max(ones, 0)):  # the lowest bit of each word that is left
        is_set = word != 0
        lowest = word & (0 - word)
        place = first + _ones(lowest - 1)
        tl.store(places + at, place, mask=is_set)
        tl.store(rows + at, tl.load(row_at + place, mask=is_set, other=0).to(tl.int64), mask=is_set)
        at += is_set.to(tl.int64)
        word ^= lowest


@triton.jit
def give_slots_kernel(
    new_rows, new_places, new_slots, old_rows, is_dirty, report, slot_of, row_at, owner, kept, used, heat, dirty,
    clock, one: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Hand the chosen slots over; a changed row that loses its slot exchanges places with the one that gets it."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    here = i < tl.load(report + 1) * tl.load(report)
    row, old = tl.load(new_rows + i, mask=here, other=0), tl.load(old_rows + i, mask=here, other=-1)
    slot, place = tl.load(new_slots + i, mask=here, other=0), tl.load(new_places + i, mask=here, other=0)
    keeps = tl.load(kept + slot, mask=here, other=0).to(tl.int64)
    leaves = here & (old >= 0)
    writes = leaves & (tl.load(dirty + slot, mask=here, other=0) > 0)
    tl.store(is_dirty + i, writes.to(tl.uint8), mask=here)
    tl.store(slot_of + old, (-1 - tl.where(writes, place, keeps)).to(tl.int32), mask=leaves)
    tl.store(slot_of + row, (slot + 1).to(tl.int32), mask=here)
    tl.store(row_at + place, old.to(tl.int32), mask=writes)
    tl.store(row_at + keeps, row.to(tl.int32), mask=writes)
    tl.store(kept + slot, place.to(tl.int32), mask=here & ~writes)
    tl.store(owner + slot, row, mask=here)
    tl.store(used + slot, tl.full([block], 0, tl.int32) + tl.load(clock), mask=here)
    tl.store(heat + slot, tl.full([block], one, tl.int32), mask=here)
    tl.store(dirty + slot, writes.to(tl.uint8), mask=here)  # what is at the place that it keeps is not this row


@triton.jit(do_not_specialize=["count"])
def resolve_kernel(rows, slots, slot_of, count, block: tl.constexpr):
    """Write the slots of entries that had none."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    here = n < count
    absent = here & (tl.load(slots + n, mask=here, other=0) < 0)
    row = tl.load(rows + n, mask=absent, other=0).to(tl.int64)
    slot = tl.load(slot_of + row, mask=absent, other=1) - 1
    tl.store(slots + n, slot.to(slots.dtype.element_ty), mask=absent)


@triton.jit(do_not_specialize=["first_table", "last_table", "row_bytes"])
def address_kernel(
    new_places, is_dirty, starts, report, addresses, first_rows, found, moved, first_table, last_table, row_bytes,
    block: tl.constexpr,
):  # fmt: skip
    """Write the addresses of places in host memory, and count what moves.

    Args:
        addresses, first_rows: of the tables of this layout, where their rows lie and the first of these.
    """
    start, stop = tl.load(starts + first_table), tl.load(starts + last_table)
    if tl.load(report) == 0:
        stop = start
    i = start + tl.program_id(0) * block + tl.arange(0, block)
    here = i < stop
    place = tl.load(new_places + i, mask=here, other=0)
    memory, first = tl.full([block], 0, tl.int64), tl.full([block], 0, tl.int64)
    for t in range(last_table - first_table):
        own = tl.load(first_rows + first_table + t)
        memory = tl.where(place >= own, tl.load(addresses + t), memory)
        first = tl.where(place >= own, own, first)
    tl.store(found + i, memory + (place - first) * row_bytes, mask=here)
    number = tl.sum(here.to(tl.int64), 0)
    if number > 0:
        tl.atomic_add(moved, number, sem="relaxed")
        written = tl.load(is_dirty + i, mask=here, other=0)
        tl.atomic_add(moved + 1, tl.sum(written.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["first_table", "last_table", "first_slot", "num_parts", "few_rows"])
def swap_kernel(
    new_slots, addresses, is_dirty, starts, report, parts, first_table, last_table, first_slot, num_parts, few_rows,
    few: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Exchange rows between slots and host memory, in the order of their addresses.

    Each program moves rows that follow one another, in a region of host memory of its own. What is written goes to the
    address that the same threads have read from.

    Args:
        addresses: what `address_kernel` wrote.
        parts: (C, 4): of each part of a column its address, how far apart its rows lie, its offset in a row of host
            memory, and its width, in words.
        few_rows: up to so many are moved by the first `few` programs alone.
    """
    start, stop = tl.load(starts + first_table), tl.load(starts + last_table)
    if tl.load(report) == 0:
        stop = start
    programs = tl.num_programs(0)
    if stop - start <= few_rows:
        programs = few
        if tl.program_id(0) >= few:
            stop = start
    share = tl.cdiv(tl.cdiv(stop - start, block), programs) * block
    first = start + tl.program_id(0) * share
    last = tl.minimum(first + share, stop)
    w = tl.arange(0, width)[None, :]
    for at in range(first, last, block):
        i = at + tl.arange(0, block)
        here = i < last
        address, writes = tl.load(addresses + i, mask=here, other=0), tl.load(is_dirty + i, mask=here, other=0)
        slot = tl.load(new_slots + i, mask=here, other=0) - first_slot
        for c in range(num_parts):
            column, apart = tl.load(parts + c * 4), tl.load(parts + c * 4 + 1)
            offset, size = tl.load(parts + c * 4 + 2), tl.load(parts + c * 4 + 3)
            inside = w < tl.multiple_of(size, aligned // 4)
            words = _words(address + offset * 4, w, aligned)
            fresh = tl.load(words, mask=here[:, None] & inside, other=0)
            place = _words(column + slot * apart * 4, w, aligned)
            leaves = (writes > 0)[:, None] & inside
            gone = tl.load(place, mask=leaves, other=0)
            tl.store(words, gone, mask=leaves)
            tl.store(place, fresh, mask=here[:, None] & inside)


@triton.jit
def _words(address, w, aligned: tl.constexpr):
    """Return pointers to words w of rows that begin at addresses, which `aligned` divides."""
    start = tl.multiple_of(address, [aligned]).to(tl.pointer_type(tl.int32))
    return tl.multiple_of(start, [aligned])[:, None] + w


@triton.jit(do_not_specialize=["count"])
def mark_kernel(dirty, slots, count, block: tl.constexpr):
    """Note that slots were changed."""
    n = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    slot = tl.load(slots + n, mask=n < count, other=0).to(tl.int64)
    tl.store(dirty + slot, tl.full([block], 1, tl.uint8), mask=n < count)
