"""The Numba functions of the rules inside kernels: one is chosen when a kernel is compiled, by the rule's name.

Each function moves a row `w` by its summed gradient `g`, both float32 on the stack, and the row's state in place:

    cpu(w, g, s, t, own, row, numbers, dim)

`s` and `t` are the memory of the wide states, of which row `row` begins at row * dim; `own` is that of the state with
one number for each row; `numbers` are the settings of the step (see `viviane.ops.rules.rule`).

A loop writes to one of `s` and `t` at most, and then does not read the other: the compiler, which cannot know that
they do not overlap, would not vectorize it. `g` carries what the next loop needs.
"""

# mypy: ignore-errors
# Types here are Numba's, which a checker of Python cannot see.

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload

from viviane.ops.rules import rules


def apply_rule(name: str, w: Any, g: Any, s: Any, t: Any, own: Any, row: int, numbers: Any, dim: int) -> None:
    """Move one row by the rule of a name, which is a constant of the kernel."""


@overload(apply_rule, prefer_literal=True, jit_options={"forceinline": True})
def _chosen(name, w, g, s, t, own, row, numbers, dim):
    if not isinstance(name, types.StringLiteral):
        return None
    move = rules()[name.literal_value].cpu

    def call(name, w, g, s, t, own, row, numbers, dim):
        move(w, g, s, t, own, row, numbers, dim)

    return call


def state_widths(name: str, dim: int) -> tuple[int, int, int]:
    """Return how many numbers of a row are in its first and second wide state, and in the state for each row."""
    rule = rules()[name]
    wide = len(rule.states) - len(rule.per_row)
    return dim * (wide > 0), dim * (wide > 1), len(rule.per_row)
