"""A stand-in for mpi4py where it is not installed: one process, or those that torchrun started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from viviane.compat.hugectr.arguments import say


class World:
    """A communicator. Among several processes it knows its rank and their number; messages are for one process."""

    def __init__(self) -> None:
        self.rank, self.size = (
            int(os.environ.get(name, value)) for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"))
        )

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of this process."""
        return self.rank

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of processes."""
        return self.size

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait for nobody: training waits for all by itself."""

    barrier = Barrier

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value itself: each process runs the same script."""
        return value

    Bcast = bcast

    def gather(self, value: Any, root: int = 0) -> list[Any]:
        """Return a list of the value."""
        return [value]

    def allgather(self, value: Any) -> list[Any]:
        """Return a list of the value."""
        return [value]

    def scatter(self, values: Sequence[Any], root: int = 0) -> Any:
        """Return this process's value."""
        return values[self.rank]

    def allreduce(self, value: Any, op: Any = None) -> Any:
        """Return the value."""
        return value

    reduce = allreduce

    def Abort(self, errorcode: int = 0) -> None:  # noqa: N802 - mpi4py's name
        """End the script."""
        raise SystemExit(errorcode)


def stand_in() -> dict[str, ModuleType]:
    """Return modules that answer for mpi4py, none where it is installed."""
    if importlib.util.find_spec("mpi4py") is not None:
        return {}
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    operations = {name: name for name in ("SUM", "MAX", "MIN", "PROD", "LAND", "LOR")}
    vars(mpi).update(COMM_WORLD=World(), **operations, Get_processor_name=lambda: "localhost", Finalize=lambda: None)
    vars(package).update(MPI=mpi, __path__=[])
    say("Note: mpi4py is not installed; one process stands in")
    return {"mpi4py": package, "mpi4py.MPI": mpi}
