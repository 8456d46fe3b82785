"""The threads of this process that plan and copy rows in parallel; kernels release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

from viviane.core.machine import usable_cores

_MOST_THREADS: Final = 16


@cache
def num_workers() -> int:
    """Return how many threads share a large job: the cores of this process, 1 to 16.

    Example:
        >>> 1 <= num_workers() <= 16
        True
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, usable_cores() // processes))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_workers(), thread_name_prefix="viviane-rows")


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads, and would wait for them forever
    os.register_at_fork(after_in_child=_pool.cache_clear)


def run_all(jobs: Sequence[Callable[[], object]]) -> None:
    """Run jobs at the same time and return when all have ended; raise the first error.

    Jobs must not call `run_all`. A job alone runs in the caller's thread.

    Example:
        >>> seen = []
        >>> run_all([lambda: seen.append(1), lambda: seen.append(2)]); sorted(seen)
        [1, 2]
    """
    if len(jobs) == 1 or num_workers() == 1:
        for job in jobs:
            job()
        return
    waiting = [_pool().submit(job) for job in jobs[1:]]
    try:
        jobs[0]()
    finally:
        errors = [error for one in waiting if (error := one.exception()) is not None]
    if errors:
        raise errors[0]


def shares(count: int, smallest: int) -> list[tuple[int, int]]:
    """Cut 0 <= i < count into equal ranges, at most one a thread, none shorter than `smallest` unless it is all.

    Example:
        >>> shares(10, 100), shares(0, 100)
        ([(0, 10)], [(0, 0)])
    """
    parts = max(1, min(num_workers(), count // smallest))
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]
