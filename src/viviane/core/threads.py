"""Calls of a function for several items in threads, also after the main thread has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
