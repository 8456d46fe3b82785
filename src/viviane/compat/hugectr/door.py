"""The door: a module `hugectr` that stands on sys.modules while a script of HugeCTR's runs."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from viviane.compat.hugectr import inputs, tools
from viviane.compat.hugectr.arguments import Arguments, say
from viviane.compat.hugectr.enums import ENUMS, exported_members
from viviane.compat.hugectr.layers import DenseLayer, GroupDenseLayer
from viviane.compat.hugectr.model import Model
from viviane.compat.hugectr.reading import close_readers
from viviane.compat.hugectr.solver import LearningRateScheduler, OptParams, Solver
from viviane.core.errors import ConfigError, suggest

_COLLECTION: Final = "use hugectr.SparseEmbedding; for sharded tables, viviane.ShardedCollection"
_CACHE: Final = "leave it out: tables here grow with their keys, no embedding training cache is needed"
_SESSION: Final = "write the script for HugeCTR 3.1 and later, or run its JSON: viviane hugectr --train config.json"
_SERVING: Final = "predict with viviane.Model"
REFUSED: Final[dict[str, str]] = {
    "EmbeddingCollectionConfig": _COLLECTION,
    "EmbeddingTableConfig": _COLLECTION,
    "EmbeddingPlanner": _COLLECTION,
    "CommunicationStrategy": _COLLECTION,
    "CompressionStrategy": _COLLECTION,
    "CreateETC": _CACHE,
    "CreateMOS": _CACHE,
    "CreateHMemCache": _CACHE,
    "TrainPSType_t": _CACHE,
    "DataSourceParams": "give local paths",
    "TrainingCallback": "train with viviane.Model.fit(callbacks=...)",
    "Tensor_t": "read tensors with viviane.Model.module and a forward hook",
    "ModelPerfExt": "use hugectr.Model",
    "Session": _SESSION,
    "solver_parser_helper": _SESSION,
    "get_learning_rate_scheduler": _SESSION,
    "inference": _SERVING,
    "data": "give local paths",
    "optimizer": _SESSION,
}
"""Names of HugeCTR's that are not mapped, and what to do instead."""
_ARGUMENTS: Final[tuple[type[Arguments], ...]] = (
    inputs.DataReaderParams, inputs.AsyncParam, inputs.DataReaderSparseParam, inputs.Input, inputs.SparseEmbedding,
    inputs.DenseLayerComputeConfig, inputs.DenseLayerSwitchs, inputs.HybridEmbeddingParam, DenseLayer,
    GroupDenseLayer,
)  # fmt: skip


class _HugectrModule(ModuleType):
    """The module; names of HugeCTR's that are not mapped are refused with what to do instead."""

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise ConfigError("HugeCTR's name is not mapped", where=f"hugectr.{name}", fix=REFUSED[name])
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"hugectr has no {name!r} here; {suggest(name, vars(self))}")


class _AbsentModule(ModuleType):
    """A module of HugeCTR's that is not mapped: whatever is asked of it is refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fix = REFUSED[self.__name__.partition(".")[2]]
        raise ConfigError("HugeCTR's module is not mapped", where=f"{self.__name__}.{name}", fix=fix)


def modules() -> dict[str, ModuleType]:
    """Return the modules of the door, by name.

    Example:
        >>> made = modules()["hugectr"]
        >>> made.CreateSolver(lr=0.5).lr, made.Adam is made.Optimizer_t.Adam
        (0.5, True)
    """
    hugectr = _HugectrModule("hugectr", "HugeCTR's Python API, on Viviane.")
    hugectr.__path__ = []  # a package, for `import hugectr.tools`
    names: dict[str, Any] = {
        **exported_members(),
        **{kind.__name__: kind for kind in ENUMS},
        **{kind.signature.name: kind for kind in _ARGUMENTS},
        "Model": Model,
        "CreateSolver": Solver,
        "CreateOptimizer": OptParams,
        "LearningRateScheduler": LearningRateScheduler,
    }
    vars(hugectr).update(names)
    inner = ModuleType("hugectr.tools", "Data generators.")
    vars(inner).update(DataGenerator=tools.DataGenerator, DataGeneratorParams=tools.DataGeneratorParams)
    inner.__dict__.update({kind.__name__: kind for kind in ENUMS if kind.__name__ in ("Distribution_t", "PowerLaw_t")})
    hugectr.tools = inner  # type: ignore[attr-defined]
    absent = {f"hugectr.{name}": _AbsentModule(f"hugectr.{name}") for name in ("inference", "data", "optimizer")}
    return {"hugectr": hugectr, "hugectr.tools": inner, **absent}


class _World:
    """A communicator of one process, for scripts that ask mpi4py where it is missing."""

    rank, size = 0, 1

    def Get_rank(self) -> int:  # noqa: N802 - mpi4py's name
        """Return 0: the first process."""
        return 0

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return 1: there is no other."""
        return 1

    def Barrier(self) -> None:  # noqa: N802 - mpi4py's name
        """Wait for nobody."""

    barrier = Barrier

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the value itself."""
        return value


def _mpi() -> dict[str, ModuleType]:
    """Return a stand-in for mpi4py where it is not installed."""
    if importlib.util.find_spec("mpi4py") is not None:
        return {}
    package, mpi = ModuleType("mpi4py"), ModuleType("mpi4py.MPI")
    vars(mpi).update(COMM_WORLD=_World())
    vars(package).update(MPI=mpi, __path__=[])
    say("Note: mpi4py is not installed; one process stands in")
    return {"mpi4py": package, "mpi4py.MPI": mpi}


@contextmanager
def opened() -> Iterator[None]:
    """Let `import hugectr` find the door for a block; afterwards take it away, and stop all readers."""
    made = {**modules(), **_mpi()}
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        close_readers()
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def run_script(script: str | Path, args: Sequence[str] = ()) -> None:
    """Run a script of HugeCTR's as `python script args` would.

    Raises:
        ConfigError: there is no such script, or it asks for what cannot be honoured.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError("no such script", value=str(path))
    argv, search = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(path), *args], [str(path.resolve().parent)]
    try:
        with opened():
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, search
