"""The lock of a table, and methods that take it.

Compiled kernels work on a table's memory without Python's lock, so calls that change a table, and all calls of a
dynamic table, run one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from viviane.core.errors import ConfigError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class TableLock:
    """The lock of a table, which one thread may take several times; a copy of the table gets its own.

    Example:
        >>> with TableLock() as lock, lock:
        ...     lock.claim("table 'user'")
    """

    def __init__(self) -> None:
        self.reentrant = threading.RLock()
        """What `with` takes and releases; `serialized` takes it directly, without a Python call."""
        self._trainer: threading.Thread | None = None

    def __reduce__(self) -> Any:
        return TableLock, ()

    def __enter__(self) -> TableLock:
        self.reentrant.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.reentrant.release()

    def claim(self, where: str) -> None:
        """Make the current thread the one that trains the table, until `free`; call it inside the lock.

        Raises:
            ConfigError: another thread trains it, and has not ended.
        """
        own = threading.current_thread()
        if self._trainer is not None and self._trainer is not own and self._trainer.is_alive():
            raise ConfigError(
                "another thread is training this table: its looked-up rows wait for an update", where=where,
                value=own.name, allowed=self._trainer.name,
                fix="train a dynamic table from one thread at a time; step() or release() there ends its turn",
            )  # fmt: skip
        self._trainer = own

    def free(self) -> None:
        """Let any thread train the table next."""
        self._trainer = None


class Locked(Protocol):
    """What has the lock that `serialized` takes."""

    @property
    def lock(self) -> TableLock:
        """The lock."""


_Owner = TypeVar("_Owner", bound=Locked)


def serialized(
    method: Callable[Concatenate[_Owner, _Parameters], _Result],
) -> Callable[Concatenate[_Owner, _Parameters], _Result]:
    """Let calls of a method wait for one another, and for those of other such methods of the same object."""

    @wraps(method)
    def one_at_a_time(self: _Owner, *args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with self.lock.reentrant:
            return method(self, *args, **options)

    return cast("Callable[Concatenate[_Owner, _Parameters], _Result]", one_at_a_time)
