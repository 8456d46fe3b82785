"""Kernels of `viviane.ops.slot_table.gpu`: find slots, list wanted rows, choose slots to take, move rows.

Sets of rows are bits: those of a table begin at a word of their own, and 1,024 words are a block. A prefix sum of the
blocks' counts turns a set into a rising list, so that nothing is sorted.
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


@triton.jit(do_not_specialize=["stamp", "count", "num_tables"])
def find_kernel(
    rows, slots, slot_of, used, heat, wanted, counts, first_rows, first_bits, stamp, count, num_tables,
    one: tl.constexpr, half_life: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write the slots that rows have, note their use, and collect the rows that have none."""
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
        _set_bit(wanted, row + shift, absent)
        tl.atomic_add(counts + 1, number.to(tl.int64), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.atomic_add(counts, tl.full([], 0, tl.int64) + count, sem="relaxed")


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


@triton.jit(do_not_specialize=["stamp", "guard"])
def count_ages_kernel(
    blocks, owner, used, heat, found, classes, stamp, guard, ages: tl.constexpr, half_life: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Write the age of each slot of a block, and add their numbers to those of its table, (T, ages)."""
    at = blocks + tl.program_id(0) * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    j = tl.arange(0, block)
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
def report_kernel(limits, needs, starts, shifts, report, num_tables, block: tl.constexpr):
    """Write where tables begin among the new rows, how far their old rows stand behind, and what the host asks for."""
    t = tl.arange(0, block)
    here = t < num_tables
    need = tl.load(needs + t * 2, mask=here, other=0)
    free = tl.load(limits + t * 4 + 2, mask=here, other=0)
    fits = tl.load(limits + t * 4 + 3, mask=here, other=1)
    stop = tl.cumsum(need, 0)
    leaving = need - free
    tl.store(starts + t, (stop - need).to(tl.int64), mask=here)
    tl.store(starts + num_tables, tl.sum(need, 0).to(tl.int64))
    tl.store(shifts + t, (stop - need) + free - (tl.cumsum(leaving, 0) - leaving), mask=here)
    tl.store(report, tl.min(fits, 0).to(tl.int64))
    tl.store(report + 1, tl.sum(need, 0).to(tl.int64))
    tl.store(report + 2 + t, need.to(tl.int64), mask=here)
    tl.store(report + 2 + num_tables + t, tl.load(needs + t * 2 + 1, mask=here, other=0).to(tl.int64), mask=here)


@triton.jit(do_not_specialize=["num_blocks"])
def count_slots_kernel(blocks, classes, limits, found, num_blocks, ages: tl.constexpr, block: tl.constexpr):
    """Write of each block how many slots have exactly the chosen age, then how many are free: (2, B)."""
    b = tl.program_id(0)
    at = blocks + b * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    j = tl.arange(0, block)
    age = tl.load(classes + first + j, mask=j < count, other=0).to(tl.int32)
    chosen = tl.load(limits + table * 4)
    tl.store(found + b, tl.sum(((age == chosen) & (age > 0)).to(tl.int32), 0))
    tl.store(found + num_blocks + b, tl.sum((age == ages - 1).to(tl.int32), 0))


@triton.jit
def _before(stops, b, first):
    """Return the sum of the blocks from `first` on and before `b`."""
    return tl.load(stops + b - 1, mask=b > 0, other=0) - tl.load(stops + first - 1, mask=first > 0, other=0)


@triton.jit(do_not_specialize=["num_blocks"])
def take_slots_kernel(
    blocks, first_blocks, owner, classes, limits, stops, starts, report, first_rows, first_bits, leaving, new_slots,
    old_rows, num_blocks, ages: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """List the free slots to take, and collect the rows that lose theirs."""
    if tl.load(report) == 0:
        return
    b = tl.program_id(0)
    at = blocks + b * 3
    table, first, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    first_block = tl.load(first_blocks + table)
    slot = first + tl.arange(0, block)
    here = tl.arange(0, block) < count
    age = tl.load(classes + slot, mask=here, other=0).to(tl.int32)
    chosen = tl.load(limits + table * 4)
    tie, free = tl.load(limits + table * 4 + 1), tl.load(limits + table * 4 + 2)
    is_tie, is_free = ((age == chosen) & (age > 0)).to(tl.int32), (age == ages - 1).to(tl.int32)
    tie_rank = _before(stops, b, first_block) + tl.cumsum(is_tie, 0) - is_tie
    free_rank = _before(stops + num_blocks, b, first_block) + tl.cumsum(is_free, 0) - is_free
    place = tl.load(starts + table) + free_rank
    takes_free = (is_free > 0) & (free_rank < free)
    tl.store(new_slots + place, slot.to(tl.int64), mask=takes_free)
    tl.store(old_rows + place, tl.full([block], -1, tl.int64), mask=takes_free)
    leaves = (is_free == 0) & ((age > chosen) | ((is_tie > 0) & (tie_rank < tie)))
    row = tl.load(owner + slot, mask=leaves, other=0)
    _set_bit(leaving, row - tl.load(first_rows + table) + tl.load(first_bits + table), leaves)


@triton.jit
def list_rows_kernel(
    words, blocks, stops, shifts, report, slot_of, listed, slots, with_slots: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """List the rows of a set in their order, moved by their table's shift, with their slots if asked; empty the set."""
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
    place = (before + tl.cumsum(ones, 0) - ones).to(tl.int64)
    if with_slots:
        place += tl.load(shifts + tl.load(blocks + b * 3))
    row = tl.load(blocks + b * 3 + 1) + tl.arange(0, block).to(tl.int64) * 32
    for _ in range(tl.max(ones, 0)):  # the lowest bit of each word that is left
        is_set = word != 0
        lowest = word & (0 - word)
        own = row + _ones(lowest - 1)
        tl.store(listed + place, own, mask=is_set)
        if with_slots:
            slot = tl.load(slot_of + own, mask=is_set, other=1) - 1
            tl.store(slots + place, slot.to(tl.int64), mask=is_set)
        place += is_set.to(tl.int64)
        word ^= lowest


@triton.jit(do_not_specialize=["stamp"])
def give_slots_kernel(
    new_rows, new_slots, old_rows, is_dirty, report, slot_of, owner, used, heat, dirty, stamp, one: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Hand the chosen slots over, and note which of the old rows were changed."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    here = i < tl.load(report + 1) * tl.load(report)
    row, old = tl.load(new_rows + i, mask=here, other=0), tl.load(old_rows + i, mask=here, other=-1)
    slot = tl.load(new_slots + i, mask=here, other=0)
    tl.store(is_dirty + i, tl.load(dirty + slot, mask=here, other=0), mask=here)
    tl.store(slot_of + old, tl.full([block], 0, tl.int32), mask=here & (old >= 0))
    tl.store(slot_of + row, (slot + 1).to(tl.int32), mask=here)
    tl.store(owner + slot, row, mask=here)
    tl.store(used + slot, tl.full([block], 0, tl.int32) + stamp, mask=here)
    tl.store(heat + slot, tl.full([block], one, tl.int32), mask=here)
    tl.store(dirty + slot, tl.full([block], 0, tl.uint8), mask=here)


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
    new_rows, old_rows, is_dirty, starts, report, addresses, first_rows, sources, targets, moved, first_table,
    last_table, row_bytes, block: tl.constexpr,
):  # fmt: skip
    """Write where rows lie in host memory: those to read, and those to write, 0 where there is nothing to write.

    Args:
        addresses, first_rows: of the tables of this layout, where their rows lie and the first of these.
    """
    start, stop = tl.load(starts + first_table), tl.load(starts + last_table)
    if tl.load(report) == 0:
        stop = start
    i = start + tl.program_id(0) * block + tl.arange(0, block)
    here = i < stop
    new, old = tl.load(new_rows + i, mask=here, other=0), tl.load(old_rows + i, mask=here, other=-1)
    writes = here & (tl.load(is_dirty + i, mask=here, other=0) > 0) & (old >= 0)
    memory, first = tl.full([block], 0, tl.int64), tl.full([block], 0, tl.int64)
    for t in range(last_table - first_table):
        own = tl.load(first_rows + first_table + t)
        memory = tl.where(new >= own, tl.load(addresses + t), memory)
        first = tl.where(new >= own, own, first)
    tl.store(sources + i, memory + (new - first) * row_bytes, mask=here)
    tl.store(targets + i, tl.where(writes, memory + (old - first) * row_bytes, 0), mask=here)
    number = tl.sum(here.to(tl.int64), 0)
    if number > 0:
        tl.atomic_add(moved, number, sem="relaxed")
        tl.atomic_add(moved + 1, tl.sum(writes.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize=["first_table", "last_table", "first_slot", "num_parts", "few_rows"])
def swap_kernel(
    new_slots, sources, targets, starts, report, parts, first_table, last_table, first_slot, num_parts, few_rows,
    few: tl.constexpr, aligned: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Move rows between slots and host memory, both ways at once and in the order of their addresses.

    Both lists rise, so that the programs together read and write the same region of host memory at a time.

    Args:
        sources, targets: what `address_kernel` wrote.
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
    w = tl.arange(0, width)[None, :]
    for at in range(start + tl.program_id(0) * block, stop, programs * block):
        i = at + tl.arange(0, block)
        here = i < stop
        source, target = tl.load(sources + i, mask=here, other=0), tl.load(targets + i, mask=here, other=0)
        slot = tl.load(new_slots + i, mask=here, other=0) - first_slot
        for c in range(num_parts):
            column, apart = tl.load(parts + c * 4), tl.load(parts + c * 4 + 1)
            offset, size = tl.load(parts + c * 4 + 2), tl.load(parts + c * 4 + 3)
            inside = w < tl.multiple_of(size, aligned // 4)
            fresh = tl.load(_words(source + offset * 4, w, aligned), mask=here[:, None] & inside, other=0)
            place = _words(column + slot * apart * 4, w, aligned)
            leaves = (target > 0)[:, None] & inside
            gone = tl.load(place, mask=leaves, other=0)
            tl.store(_words(target + offset * 4, w, aligned), gone, mask=leaves)
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
