"""A replacement for mpi4py if it is not installed: one process, or those that torchrun started."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.processes import group
from viviane.core.errors import ConfigError

_IN_PLACE: Final = "MPI_IN_PLACE"
_TYPES: Final = {
    name: name
    for name in ("BYTE", "CHAR", "INT", "LONG", "FLOAT", "DOUBLE", "BOOL", "INT32_T", "INT64_T", "UINT32_T", "UINT64_T")
}
"""Types of buffers: an array already has its own."""
_THREADS: Final = {"THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3}
_OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "SUM": operator.add, "PROD": operator.mul, "MAX": max, "MIN": min, "LAND": lambda a, b: bool(a and b),
    "LOR": lambda a, b: bool(a or b),
}  # fmt: skip


class World:
    """The communicator of all processes. Exchanged values may be numbers, strings, lists and dicts."""

    def __init__(self) -> None:
        self.rank, self.size = (
            int(os.environ.get(name, value)) for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"))
        )

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the rank of this process."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of processes."""
        return self.size

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait for all processes."""
        self.allgather(0)

    barrier = Barrier

    def allgather(self, value: Any) -> list[Any]:
        """Return the value of every process."""
        return [value] if self.size == 1 else group().gather_data(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all processes on one rank, None on the others."""
        found = self.allgather(value)
        return found if self.rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of one rank."""
        return self.allgather(value)[root]

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's element of the sequence that one rank supplies."""
        return self.allgather(values)[root][self.rank]

    def allreduce(self, value: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return the reduction of the values of all processes."""
        return functools.reduce(op, self.allgather(value))

    def reduce(self, value: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0) -> Any:
        """Return the reduction of the values of all processes on one rank, None on the others."""
        found = self.allreduce(value, op)
        return found if self.rank == root else None

    def Bcast(self, array: Any, root: int = 0) -> None:  # noqa: N802 - mpi4py's name
        """Fill an array with that of one rank."""
        if self.size > 1:
            own = _array(array)
            own[...] = np.asarray(self.allgather(own.tolist())[root], own.dtype)

    def Dup(self) -> World:  # noqa: N802 - mpi4py's name
        """Return the communicator itself."""
        return self

    def Split(self, color: int = 0, key: int = 0) -> World:  # noqa: N802 - mpi4py's name
        """Return the communicator of the processes of a colour; only supported for one process.

        Raises:
            ConfigError: there are several processes.
        """
        if self.size > 1:
            _refuse("Split")
        return self

    def Split_type(self, split_type: int, key: int = 0, info: Any = None) -> World:  # noqa: N802 - mpi4py's name
        """Return the communicator of this machine: that of all processes if they run on one machine.

        Raises:
            ConfigError: the processes run on several machines.
        """
        if os.environ.get("LOCAL_WORLD_SIZE", str(self.size)) != str(self.size):
            _refuse("Split_type")
        return self

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        """Return the element that every process supplies for this rank."""
        return [row[self.rank] for row in self.allgather(list(values))]

    def scan(self, value: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return the reduction of the values of the ranks up to this one."""
        return functools.reduce(op, self.allgather(value)[: self.rank + 1])

    def exscan(self, value: Any, op: Callable[[Any, Any], Any] = operator.add) -> Any:
        """Return the reduction of the values of the ranks before this one, None on rank 0."""
        before = self.allgather(value)[: self.rank]
        return functools.reduce(op, before) if before else None

    def Scatter(self, sent: Any, received: Any, root: int = 0) -> None:  # noqa: N802 - mpi4py's name
        """Fill an array with this rank's part of the array of one rank."""
        whole = self.allgather(_array(sent).tolist() if self.rank == root else None)[root]
        if not _is_in_place(received):
            _fill(received, np.array_split(np.asarray(whole).reshape(-1), self.size)[self.rank])

    def Allgather(self, sent: Any, received: Any) -> None:  # noqa: N802 - mpi4py's name
        """Fill an array with the concatenated arrays of all processes."""
        parts = [np.asarray(part) for part in self.allgather(_array(sent).tolist())]
        _fill(received, np.concatenate([part.reshape(-1) for part in parts]))

    def Gather(self, sent: Any, received: Any, root: int = 0) -> None:  # noqa: N802 - mpi4py's name
        """Fill an array of one rank with the concatenated arrays of all processes."""
        parts = [np.asarray(part) for part in self.allgather(_array(sent).tolist())]
        if self.rank == root:
            _fill(received, np.concatenate([part.reshape(-1) for part in parts]))

    def Allreduce(self, sent: Any, received: Any, op: Callable[[Any, Any], Any] = operator.add) -> None:  # noqa: N802
        """Fill an array with the elementwise reduction of the arrays of all processes.

        Args:
            sent: this process's array, or IN_PLACE to use `received`.
            received: the array to fill.
            op: one of MPI's operations.
        """
        _fill(received, self._reduced(received if _is_in_place(sent) else sent, op))

    def Reduce(  # noqa: N802 - mpi4py's name
        self, sent: Any, received: Any, op: Callable[[Any, Any], Any] = operator.add, root: int = 0
    ) -> None:
        """Fill an array of one rank with the elementwise reduction; arguments as for `Allreduce`."""
        found = self._reduced(received if _is_in_place(sent) else sent, op)
        if self.rank == root:
            _fill(received, found)

    def _reduced(self, array: Any, op: Callable[[Any, Any], Any]) -> NDArray[Any]:
        parts = [np.asarray(part) for part in self.allgather(_array(array).tolist())]
        return np.asarray(functools.reduce(np.frompyfunc(op, 2, 1), parts))

    def Get_name(self) -> str:  # noqa: N802 - mpi4py's name
        """Return the communicator's name."""
        return "MPI_COMM_WORLD"

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        """Free the communicator, which has no resources."""

    def Abort(self, errorcode: int = 0) -> None:  # noqa: N802 - mpi4py's name
        """End the script."""
        raise SystemExit(errorcode)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)


def _array(buffer: Any) -> NDArray[Any]:
    """Return the array of a buffer, which mpi4py also takes as [array, type] or [array, count, type]."""
    return np.asarray(buffer[0] if isinstance(buffer, list | tuple) and hasattr(buffer[0], "dtype") else buffer)


def _fill(buffer: Any, values: NDArray[Any]) -> None:
    target = _array(buffer)
    target[...] = values.astype(target.dtype).reshape(target.shape)


def _is_in_place(sent: Any) -> bool:
    return isinstance(sent, str) and sent == _IN_PLACE


def _refuse(name: str) -> NoReturn:
    raise ConfigError("the replacement for mpi4py does not support this", where=f"MPI.COMM_WORLD.{name}",
                      fix="install mpi4py")  # fmt: skip


def stand_in() -> dict[str, ModuleType]:
    """Return modules that replace mpi4py; none if it is installed."""
    if importlib.util.find_spec("mpi4py") is not None:
        return {}
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    world = World()
    alone = World()
    alone.rank, alone.size = 0, 1
    vars(mpi).update(
        COMM_WORLD=world, COMM_SELF=alone, COMM_TYPE_SHARED=0, Comm=World, Intracomm=World, **_OPERATIONS,
        Get_processor_name=platform.node, Wtime=time.perf_counter, Init=lambda: None, Finalize=lambda: None,
        Wtick=lambda: time.get_clock_info("perf_counter").resolution, Is_initialized=lambda: True,
        Is_finalized=lambda: False, Init_thread=lambda required=3: 3, Query_thread=lambda: 3,
        Is_thread_main=lambda: threading.current_thread() is threading.main_thread(), Get_version=lambda: (3, 1),
        Get_library_version=lambda: "a stand-in of viviane", get_vendor=lambda: ("viviane", (0, 0, 0)),
        IN_PLACE=_IN_PLACE, ANY_SOURCE=-1, ANY_TAG=-1, ROOT=-3, COMM_NULL=None,
        INFO_NULL=None, UNDEFINED=-32766, **_THREADS, **_TYPES,
    )  # fmt: skip
    rc = SimpleNamespace(initialize=True, finalize=True, threads=True, thread_level="multiple")
    vars(package).update(MPI=mpi, rc=rc, __path__=[], __version__="4.0.0")
    who = "one process is used" if world.size == 1 else f"the {world.size} processes of torchrun are used"
    say(f"Note: mpi4py is not installed; {who}")
    return {"mpi4py": package, "mpi4py.MPI": mpi}
