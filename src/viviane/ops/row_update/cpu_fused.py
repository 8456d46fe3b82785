"""The kernel that sums the gradients of equal rows and moves a row as soon as its last gradient is there.

Gradients are read in their order, which the processor foresees. What a row that comes again has summed waits in a
place of its own; a row that comes once goes from its gradient straight to its weights. Sums have the order of the
entries, so they are bit by bit those of `sum_kernel`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from numba import float32, int64, njit

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel
from viviane.ops.native.memory import float32_at, float64_at, int64_at, prefetch_second, stack_floats, take_ticket
from viviane.ops.native.numbers import FLOAT32, add_numbers, load
from viviane.ops.row_update.cpu_kernels import move_row, name_of, source_of
from viviane.ops.rules.numba_rules import state_widths

_AHEAD: Final = 12
_ROWS_AHEAD: Final = 8
_FIRST: Final = 2
_LAST: Final = 1


@njit(forceinline=True)
def order_moves(met, touched, begin, end, base, lasts, places, moves):  # type: ignore[no-untyped-def]
    """Write over each entry's slot: its place among the sums (from `base` on) * 4 + whether first * 2 + whether last.

    Only rows that come again take places: one place for 2 entries at least, so that all stay below 2^30. `moves` gets
    the rows in the order of their last entries, from `begin` on; the end of them is returned.
    """
    for k in range(begin, end):
        lasts[begin + (met[k] & 0xFFFFFFFF)] = k
    done, seen, free = begin, 0, base
    for k in range(begin, end):
        slot = met[k] & 0xFFFFFFFF
        first, last = int64(slot == seen), int64(lasts[begin + slot] == k)
        place = free if first != 0 else places[begin + slot]
        places[begin + slot] = place
        moves[done] = touched[begin + slot]
        met[k] = ((met[k] >> 32) << 32) + place * 4 + first * _FIRST + last * _LAST
        seen += first
        free += first & (1 - last)
        done += last
    return done


@njit(forceinline=True)
def prefetch_lines(address, at, item, dim):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of `dim` numbers of `item` bytes from number `at` on."""
    for byte in range(0, item * dim, 64):
        prefetch_second(address + item * at + byte)


@cache
def fused_kernel(rule: str, dim: int, kind: int, gradient_kind: int, key: str) -> Kernel:
    """Build the kernel, for rows and gradients of some kinds; a ticket is an owner."""
    item, gradient_item = (4 if one == 0 else 2 for one in (kind, gradient_kind))
    first_state, second_state, own_state = state_widths(rule, dim)

    @kernel
    def sum_and_move(call):  # type: ignore[no-untyped-def]
        _ = key
        gradients, sources, source_size = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2]
        weighted, weights = call[OPERANDS + 3] != 0, float32_at(call[OPERANDS + 3])
        met, touched, counts = int64_at(call[OPERANDS + 4]), int64_at(call[OPERANDS + 5]), int64_at(call[OPERANDS + 6])
        stride, owners = call[OPERANDS + 7], call[1]
        lasts, places, moves = int64_at(call[OPERANDS + 8]), int64_at(call[OPERANDS + 9]), int64_at(call[OPERANDS + 10])
        sums_address, sums, weight = call[OPERANDS + 11], float32_at(call[OPERANDS + 11]), call[OPERANDS + 12]
        s, t, own = float32_at(call[OPERANDS + 13]), float32_at(call[OPERANDS + 14]), float32_at(call[OPERANDS + 15])
        numbers, seed_and_step = float64_at(call[OPERANDS + 16]), call[OPERANDS + 17]
        names, first_name = call[OPERANDS + 18], call[OPERANDS + 19]
        g, w = stack_floats(dim), stack_floats(dim)
        owner = take_ticket(call)
        while owner < owners:
            base, begin, end = 0, owner * stride, owner * stride + counts[owner]
            for before in range(owner):
                base += counts[owners + before]
            final = order_moves(met, touched, begin, end, base, lasts, places, moves) - 1
            done = begin
            for k in range(begin, end):
                later, entry = met[min(k + _AHEAD, end - 1)], met[k]
                prefetch_lines(gradients, source_of(sources, source_size, later >> 32, dim), gradient_item, dim)
                prefetch_lines(sums_address, ((later & 0xFFFFFFFF) >> 2) * dim, 4, dim)
                n, at = entry >> 32, ((entry & 0xFFFFFFFF) >> 2) * dim
                start = source_of(sources, source_size, n, dim)
                if gradient_kind == FLOAT32 and not weighted and entry & (_FIRST | _LAST) == 0:
                    add_numbers(sums_address + 4 * at, gradients + 4 * start, dim)
                    continue
                factor = weights[n] if weighted else float32(1.0)
                # By way of the stack, which overlaps with nothing: the compiler then adds in wide pieces.
                for j in range(dim):
                    g[j] = factor * load(gradients, start + j, gradient_kind)
                if entry & _FIRST == 0:
                    for j in range(dim):
                        g[j] += sums[at + j]
                if entry & _LAST == 0:
                    for j in range(dim):
                        sums[at + j] = g[j]
                else:
                    coming = moves[min(done + _ROWS_AHEAD, final)]
                    prefetch_lines(weight, coming * dim, item, dim)
                    prefetch_lines(call[OPERANDS + 13], coming * first_state, 4, first_state)
                    prefetch_lines(call[OPERANDS + 14], coming * second_state, 4, second_state)
                    prefetch_lines(call[OPERANDS + 15], coming * own_state, 4, own_state)
                    name = name_of(names, moves[done], first_name)
                    move_row(rule, weight, kind, w, g, s, t, own, moves[done], numbers, seed_and_step, name, dim)
                    done += 1
            owner = take_ticket(call)

    return sum_and_move
