"""Named ranges of time for the profiler: they cost only a test of a flag unless a trace is being recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from torch.profiler import record_function

PREFIX: Final = "viviane: "
"""Prefix of range names in a trace, which distinguishes them from those of other libraries."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOTHING: Final = nullcontext()


class _Switch:
    on = False


@contextmanager
def recording() -> Iterator[None]:
    """Enable recording of ranges for a block, in all threads."""
    before, _Switch.on = _Switch.on, True
    try:
        yield
    finally:
        _Switch.on = before


def are_recorded() -> bool:
    """Whether ranges are recorded now."""
    return _Switch.on


def time_range(name: str) -> AbstractContextManager[object]:
    """Return a context that an active profiler records under this name.

    Example:
        >>> with time_range("forward"):
        ...     2 + 2
        4
    """
    return record_function(PREFIX + name) if _Switch.on else _NOTHING


def timed_as(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that records calls as a range.

    Example:
        >>> timed_as("loss")(abs)(-3)
        3
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if not _Switch.on:
                return function(*args, **kwargs)
            with record_function(PREFIX + name):
                return function(*args, **kwargs)

        return call

    return decorate
