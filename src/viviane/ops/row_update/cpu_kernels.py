"""Kernels that sum the gradients of equal rows, and that move a row, or all rows of a table, by a rule."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numba import float32, njit

from viviane.ops.native.kernels import OPERANDS, Kernel, kernel
from viviane.ops.native.memory import float32_at, float64_at, int64_at, prefetch, read_whole, stack_floats, take_ticket
from viviane.ops.native.numbers import load, noise_start, square_sum, store_stochastic
from viviane.ops.rules.numba_rules import apply_rule, state_widths
from viviane.ops.rules.rule import CLIP, DECAY, SCALE

_AHEAD: Final = 12


@njit(forceinline=True)
def source_of(sources, size, n, dim):  # type: ignore[no-untyped-def]
    """Return where the gradient of an entry begins: `sources` of `size` bytes each, or 0 for entry after entry."""
    return read_whole(sources, n, size) if size != 0 else n * dim


@njit(forceinline=True)
def prefetch_numbers(address, at, item, dim):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of `dim` numbers of `item` bytes from number `at` on."""
    for byte in range(0, item * dim, 64):
        prefetch(address + item * at + byte)


@cache
def sum_kernel(dim: int, kind: int, key: str) -> Kernel:
    """Build the kernel that sums gradients by slot, owner after owner, and lists the slots' rows; a ticket is an owner.

    Gradients are read in their order, which the processor foresees; the sums are few and stay in its caches.
    """
    item = 4 if kind == 0 else 2

    @kernel
    def sum_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        gradients, sources, source_size = call[OPERANDS], call[OPERANDS + 1], call[OPERANDS + 2]
        weighted, weights = call[OPERANDS + 3] != 0, float32_at(call[OPERANDS + 3])
        met, touched, counts = int64_at(call[OPERANDS + 4]), int64_at(call[OPERANDS + 5]), int64_at(call[OPERANDS + 6])
        stride, owners = call[OPERANDS + 7], call[1]
        rows, sums_address, sums = int64_at(call[OPERANDS + 8]), call[OPERANDS + 9], float32_at(call[OPERANDS + 9])
        g = stack_floats(dim)
        owner = take_ticket(call)
        while owner < owners:
            base, slots, begin, num_met = 0, counts[owners + owner], owner * stride, counts[owner]
            for before in range(owner):
                base += counts[owners + before]
            for slot in range(slots):
                rows[base + slot] = touched[begin + slot]
            seen = 0
            for k in range(begin, begin + num_met):
                later = met[min(k + _AHEAD, begin + num_met - 1)]
                prefetch_numbers(gradients, source_of(sources, source_size, later >> 32, dim), item, dim)
                prefetch_numbers(sums_address, (base + (later & 0xFFFFFFFF)) * dim, 4, dim)
                n, slot = met[k] >> 32, met[k] & 0xFFFFFFFF
                start, at = source_of(sources, source_size, n, dim), (base + slot) * dim
                factor = weights[n] if weighted else float32(1.0)
                # By way of the stack, which overlaps with nothing: the compiler then adds in wide pieces.
                for j in range(dim):
                    g[j] = factor * load(gradients, start + j, kind)
                if slot == seen:
                    seen += 1
                    for j in range(dim):
                        sums[at + j] = g[j]
                else:
                    for j in range(dim):
                        sums[at + j] += g[j]
            owner = take_ticket(call)

    return sum_rows


@njit(forceinline=True)
def first_at_least(rising, count, value):  # type: ignore[no-untyped-def]
    """Return the place of the first number of a rising list that is not below a value."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@njit(forceinline=True)
def name_of(names, row, first_name):  # type: ignore[no-untyped-def]
    """Return what stochastic rounding takes a row for: itself where there are no names."""
    return int64_at(names)[row] - first_name if names != 0 else row


@njit(forceinline=True)
def move_row(rule, weight, kind, w, g, s, t, own, row, numbers, seed_and_step, name, dim):  # type: ignore[no-untyped-def]
    """Move one row of the table by its summed gradient `g`; `w` is room on the stack, `name` the row to rounding."""
    for j in range(dim):
        w[j] = load(weight, row * dim + j, kind)
    shape_gradient(w, g, numbers, dim)
    apply_rule(rule, w, g, s, t, own, row, numbers, dim)
    start = noise_start(seed_and_step, name)
    for j in range(dim):
        store_stochastic(weight, row * dim + j, w[j], kind, start, j)


@njit(forceinline=True)
def shape_gradient(w, g, numbers, dim):  # type: ignore[no-untyped-def]
    """Scale, clip and decay: g *= scale; g *= min(1, clip / |g|); g += decay w."""
    scale, clip, decay = float32(numbers[SCALE]), float32(numbers[CLIP]), float32(numbers[DECAY])
    for j in range(dim):
        g[j] *= scale
    if clip > 0:
        factor = clip / max(np.sqrt(square_sum(g, dim)), clip)
        for j in range(dim):
            g[j] *= factor
    for j in range(dim):
        g[j] += decay * w[j]


@cache
def move_kernel(rule: str, dim: int, kind: int, key: str) -> Kernel:
    """Build the kernel that moves listed rows by a rule, or all rows of a table of which some are listed, rising."""
    item = 4 if kind == 0 else 2
    first_state, second_state, own_state = state_widths(rule, dim)

    @kernel
    def move_rows(call):  # type: ignore[no-untyped-def]
        _ = key
        rows, sums, listed = int64_at(call[OPERANDS]), float32_at(call[OPERANDS + 1]), call[OPERANDS + 2]
        whole, count = call[OPERANDS + 3] != 0, max(call[OPERANDS + 2], call[OPERANDS + 3])
        weight, s, t = call[OPERANDS + 4], float32_at(call[OPERANDS + 5]), float32_at(call[OPERANDS + 6])
        own, numbers = float32_at(call[OPERANDS + 7]), float64_at(call[OPERANDS + 8])
        seed_and_step, names, first_name = call[OPERANDS + 9], call[OPERANDS + 10], call[OPERANDS + 11]
        tickets = call[1]
        g, w = stack_floats(dim), stack_floats(dim)
        ticket = take_ticket(call)
        while ticket < tickets:
            begin, end = count * ticket // tickets, count * (ticket + 1) // tickets
            i = first_at_least(rows, listed, begin) if whole else begin
            for position in range(begin, end):
                if not whole:
                    later = rows[min(position + _AHEAD, end - 1)]
                    prefetch_numbers(weight, later * dim, item, dim)
                    prefetch_numbers(call[OPERANDS + 5], later * first_state, 4, first_state)
                    prefetch_numbers(call[OPERANDS + 6], later * second_state, 4, second_state)
                    prefetch_numbers(call[OPERANDS + 7], later * own_state, 4, own_state)
                row = position if whole else rows[position]
                if whole and not (i < listed and rows[i] == row):
                    for j in range(dim):
                        g[j] = float32(0.0)
                else:
                    for j in range(dim):
                        g[j] = sums[i * dim + j]
                    i += 1
                move_row(
                    rule,
                    weight,
                    kind,
                    w,
                    g,
                    s,
                    t,
                    own,
                    row,
                    numbers,
                    seed_and_step,
                    name_of(names, row, first_name),
                    dim,
                )
            ticket = take_ticket(call)

    return move_rows
