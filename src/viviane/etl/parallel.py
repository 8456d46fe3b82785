"""Do work on several threads and take the results in order, with only a few in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int, *, ahead: int = 0) -> Iterator[R]:
    """Yield work(item) in the order of items; at most threads + ahead + 1 items are in progress.

    With `ahead`, threads go on with items that wait while the caller makes the next ones and takes results.

    Example:
        >>> list(ordered_map(lambda x: x * x, range(4), 2))
        [0, 1, 4, 9]
    """
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads + ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
