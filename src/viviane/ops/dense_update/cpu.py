"""The dense update on the CPU: one kernel over all tensors, which reads and writes each number once.

The arithmetic is that of the rows of embedding tables (`viviane.ops.rules`), block by block.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Final

from numba import float32, njit
from torch import Tensor

from viviane.ops.dense_update import check_moved, gradient_type
from viviane.ops.dense_update.reference import check_finite, mark, update_scaled_status, update_status
from viviane.ops.native.kernels import OPERANDS, Kernel, kernel, num_threads, sources
from viviane.ops.native.memory import float32_at, float64_at, int64_at, stack_floats, take_ticket
from viviane.ops.native.numbers import FLOAT32, KINDS, load, product
from viviane.ops.rules import dense_rules
from viviane.ops.rules.numba_rules import apply_rule
from viviane.ops.rules.rule import DECAY, SCALE

if TYPE_CHECKING:
    from viviane.ops.dense_update import Workspace

__all__ = ["check_finite", "mark", "move_tensors", "update_scaled_status", "update_status"]

_BLOCK: Final = 64


def move_tensors(
    rule: str,
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    numbers: Tensor | Sequence[float],
    *,
    inside: bool,
    decays: bool,
    scale: Tensor | None,
    gate: Tensor | None,
    workspace: Workspace,
) -> None:
    """Move parameters and state in place."""
    if gate is not None and not bool(gate):
        return
    if not all(map(Tensor.is_contiguous, gradients)):
        gradients = [one.contiguous() for one in gradients]
    both = [*states, *[params] * (2 - len(states))]
    sizes = check_moved(params, gradients, states)
    kind = KINDS[gradient_type(gradients)]
    # Addresses column by column, then sizes.
    table, total = array("q", [*map(Tensor.data_ptr, chain(params, gradients, *both)), *sizes]), sum(sizes)
    given_numbers = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    values = _numbers(rule, given_numbers, inside, decays, 1.0 if scale is None else float(scale))
    given = (ctypes.c_double * len(values))(*values)
    threads = num_threads(total)
    update_kernel(rule, kind, sources())(
        (table.buffer_info()[0], len(params), total, ctypes.addressof(given)), tickets=threads, threads=threads
    )


def _numbers(rule: str, given: Sequence[float], inside: bool, decays: bool, scale: float) -> list[float]:
    """Return what the rule's Numba function reads, from the numbers that this operation is given."""
    own = dense_rules()[rule]
    return [scale, 0.0, given[1] if decays else 0.0, *own.cpu_dense_numbers(given, inside)]


@njit(forceinline=True)
def shares(begin, end, start, size):  # type: ignore[no-untyped-def]
    """Return which numbers of a tensor that begins at `start` of all lie between begin and end, in whole blocks.

    A share ends where a block does: what is computed in blocks and what one by one, which compilers may round
    otherwise, is the same however many threads share the work.
    """
    first, stop = max(begin - start, 0), max(end - start, 0)
    first = size if first >= size else first // _BLOCK * _BLOCK
    return first, size if stop >= size else stop // _BLOCK * _BLOCK


@njit(forceinline=True)
def move_block(rule, kind, weight, gradient, first, second, w, g, numbers, count):  # type: ignore[no-untyped-def]
    """Move `count` neighbouring numbers, by way of the stack, which overlaps with nothing."""
    scale, decay = float32(numbers[SCALE]), float32(numbers[DECAY])
    weights = float32_at(weight)
    for j in range(count):
        w[j] = weights[j]
    for j in range(count):
        g[j] = product(load(gradient, j, kind), scale) + product(decay, w[j])
    apply_rule(rule, w, g, float32_at(first), float32_at(second), weights, 0, numbers, count)
    for j in range(count):
        weights[j] = w[j]


@cache
def update_kernel(rule: str, kind: int, key: str) -> Kernel:
    """Build the kernel that moves all tensors by a rule and gradients of a kind; a ticket is a share of all numbers."""
    width = 4 if kind == FLOAT32 else 2

    @kernel
    def move_dense(call):  # type: ignore[no-untyped-def]
        _ = key
        table, count, total = int64_at(call[OPERANDS]), call[OPERANDS + 1], call[OPERANDS + 2]
        numbers, tickets = float64_at(call[OPERANDS + 3]), call[1]
        w, g = stack_floats(_BLOCK), stack_floats(_BLOCK)
        ticket = take_ticket(call)
        while ticket < tickets:
            begin, end, start = total * ticket // tickets, total * (ticket + 1) // tickets, 0
            for i in range(count):
                weight, gradient, s, t = table[i], table[count + i], table[2 * count + i], table[3 * count + i]
                size = table[4 * count + i]
                at, stop = shares(begin, end, start, size)
                start += size
                while at + _BLOCK <= stop:
                    place, there = 4 * at, gradient + width * at
                    move_block(rule, kind, weight + place, there, s + place, t + place, w, g, numbers, _BLOCK)
                    at += _BLOCK
                while at < stop:
                    place, there = 4 * at, gradient + width * at
                    move_block(rule, kind, weight + place, there, s + place, t + place, w, g, numbers, 1)
                    at += 1
            ticket = take_ticket(call)

    return move_dense
