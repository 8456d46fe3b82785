"""Which keys two evenly spaced ranges share, and where they stand in each: all that moving rows between plans needs."""

from __future__ import annotations

from math import gcd


def overlap(one: range, other: range) -> range:
    """Return the keys that are in both ranges; steps are positive.

    With steps s and t the common keys are lcm(s, t) apart; the first is found by the Chinese remainder theorem.

    Example:
        >>> list(overlap(range(1, 30, 4), range(0, 30, 3)))
        [9, 21]
        >>> list(overlap(range(0, 10, 2), range(1, 10, 2)))
        []
    """
    if not one or not other:
        return range(0)
    common = gcd(one.step, other.step)
    distance = other.start - one.start
    if distance % common:
        return range(0)
    step = one.step // common * other.step
    turns = distance // common * pow(one.step // common, -1, other.step // common) % (other.step // common)
    first = one.start + turns * one.step
    missing = max(one.start, other.start) - first
    if missing > 0:
        first += -(-missing // step) * step
    return range(first, min(one[-1], other[-1]) + 1, step)


def positions(part: range, whole: range) -> slice:
    """Return where the keys of `part`, which are all in `whole`, stand there.

    Example:
        >>> positions(range(9, 22, 12), range(1, 30, 4))
        slice(2, 6, 3)
    """
    start = (part[0] - whole.start) // whole.step
    step = max(1, part.step // whole.step)
    return slice(start, start + (len(part) - 1) * step + 1, step)
