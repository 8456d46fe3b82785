"""Threads: calls of a function for several items, and the interpreter's switch interval."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_SWITCH_S: Final = 0.0005
_switching: Final = threading.Lock()
_intervals_s: Final[list[float]] = []
"""The switch interval before each of the blocks that are in progress."""


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let a thread have the interpreter's lock back within 0.5 ms while another one runs Python.

    A thread waits for the switch interval, 5 ms by default, each time that it comes back from a kernel or a system
    call and finds the lock taken. Blocks may overlap in any order; the last to end restores the interval.

    Example:
        >>> with short_switch_interval():
        ...     sys.getswitchinterval()
        0.0005
    """
    with _switching:
        _intervals_s.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_SWITCH_S, _intervals_s[0]))
    try:
        yield
    finally:
        with _switching:
            first = _intervals_s[0]
            _intervals_s.pop()
            if not _intervals_s:
                sys.setswitchinterval(first)


def map_at_once(work: Callable[[T], R], items: Iterable[T], most: int) -> list[R]:
    """Return work(item) for all items, in their order; this thread and up to `most` - 1 others call it.

    A pool of `concurrent.futures` takes no work once the main thread has ended, and a checkpoint may be written behind
    it. Python 3.12 starts no thread then either: this thread does all of the work.

    Raises:
        BaseException: the first one of an item; no further item is begun.

    Example:
        >>> map_at_once(lambda one: one * one, [1, 2, 3], 2)
        [1, 4, 9]
    """
    given = list(items)
    left = iter(range(len(given)))  # its steps are atomic: each number goes to one thread
    found: dict[int, R] = {}
    problems: list[BaseException] = []

    def take() -> None:
        for number in left:
            if problems:
                return
            try:
                found[number] = work(given[number])
            except BaseException as problem:
                problems.append(problem)
                return

    threads = [threading.Thread(target=take) for _ in range(min(most, len(given)) - 1)]
    started = []
    with suppress(RuntimeError):
        for thread in threads:
            thread.start()
            started.append(thread)
    take()
    for thread in started:
        thread.join()
    if problems:
        raise problems[0]
    return [found[number] for number in range(len(given))]
