"""Run a function on all ranks of a group: if it fails on one rank, all ranks raise its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from viviane.core.errors import CheckpointError
from viviane.parallel import Group

T = TypeVar("T")


def on_all_ranks(group: Group, make: Callable[[], T]) -> T:
    """Call a function on every process, wait until all have returned, and return this one's result.

    Raises:
        CheckpointError: the function failed on another process; names its rank. An error on this process is raised as
            it is.

    Example:
        >>> on_all_ranks(Group(), lambda: 3)
        3
    """
    if group.size == 1:
        return make()
    failure: Exception | None = None
    result: T | None = None
    try:
        result = make()
    except Exception as error:
        failure = error
    words = group.gather_data(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, text in enumerate(words):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]


def on_first_rank(group: Group, make: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only, and return its result (plain data) on every process.

    Raises:
        CheckpointError: the function failed.

    Example:
        >>> on_first_rank(Group(), lambda: "here")
        'here'
    """
    result = on_all_ranks(group, lambda: make() if group.rank == 0 else None)
    return result if group.size == 1 else group.gather_data(result)[0]
