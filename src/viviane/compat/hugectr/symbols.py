"""The content of the installed modules, by HugeCTR's names."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from viviane.compat.hugectr import (
    beside,
    collection,
    fitting,
    inputs,
    parameter_server,
    passes,
    serving,
    session,
    tools,
)
from viviane.compat.hugectr import serving_params as params
from viviane.compat.hugectr.arguments import Arguments
from viviane.compat.hugectr.enums import ENUMS, EmbeddingCacheType_t, exported_members
from viviane.compat.hugectr.layers import DenseLayer, GroupDenseLayer
from viviane.compat.hugectr.model import Model, ModelPerfExt
from viviane.compat.hugectr.solver import LearningRateScheduler, OptParams, Solver
from viviane.compat.hugectr.sources import DataSource, DataSourceParams
from viviane.core.errors import ConfigError, suggest

REFUSED: Final[dict[str, str]] = {
    "hugectr_tf_ops": "use viviane.EmbeddingCollection in a torch module; TensorFlow's layers are not supported",
    "InitParams": "remove it: HugeCTR accepts initial values only from C++",
}
"""Unsupported names of HugeCTR, with a suggestion for each."""
_ARGUMENTS: Final[tuple[type[Arguments], ...]] = (
    inputs.DataReaderParams, inputs.AsyncParam, inputs.DataReaderSparseParam, inputs.Input, inputs.SparseEmbedding,
    inputs.DenseLayerComputeConfig, inputs.DenseLayerSwitchs, inputs.HybridEmbeddingParam, DenseLayer,
    GroupDenseLayer, collection.EmbeddingTableConfig, collection.EmbeddingCollectionConfig, passes.HMemCacheConfig,
    passes.EtcParams, passes.MosParams, DataSourceParams,
)  # fmt: skip


class HugectrModule(ModuleType):
    """A HugeCTR module; unsupported names raise an error with a suggestion."""

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise ConfigError("HugeCTR's name is unsupported", where=f"{self.__name__}.{name}", fix=REFUSED[name])
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{self.__name__} has no {name!r} here; {suggest(name, vars(self))}")


def modules() -> dict[str, ModuleType]:
    """Return the modules to install, by name.

    Example:
        >>> made = modules()["hugectr"]
        >>> made.CreateSolver(lr=0.5).lr, made.Adam is made.Optimizer_t.Adam
        (0.5, True)
    """
    hugectr = HugectrModule("hugectr", "HugeCTR's Python API, on Viviane.")
    hugectr.__path__ = []  # a package, for `import hugectr.tools`
    vars(hugectr).update(_training(), __version__="25.03")
    inner = {"tools": _tools(), "data": _data(), "inference": _inference(), "optimizer": _optimizer()}
    made: dict[str, ModuleType] = {"hugectr": hugectr}
    for name, names in inner.items():
        module = HugectrModule(f"hugectr.{name}")
        vars(module).update(names)
        setattr(hugectr, name, module)
        made[f"hugectr.{name}"] = module
    return {**made, **beside.packages()}


def _training() -> dict[str, Any]:
    return {
        **exported_members(),
        **{kind.__name__: kind for kind in ENUMS},
        **{kind.signature.name: kind for kind in _ARGUMENTS},
        "Model": Model,
        "ModelPerfExt": ModelPerfExt,
        "CreateSolver": Solver,
        "Solver": Solver,
        "CreateOptimizer": OptParams,
        "OptParamsPy": OptParams,
        "LearningRateScheduler": LearningRateScheduler,
        "TrainingCallback": fitting.TrainingCallback,
        "HMemCacheConfig": passes.HMemCacheConfig,
        "EmbeddingPlanner": collection.EmbeddingPlanner,
        "EmbeddingTablePlaceHolder": collection.EmbeddingTablePlaceHolder,
        "Session": session.Session,
        "solver_parser_helper": session.SessionSolver,
        "SolverParser": session.solver_of_file,
        "get_learning_rate_scheduler": session.get_learning_rate_scheduler,
    }


def _tools() -> dict[str, Any]:
    shown = {kind.__name__: kind for kind in ENUMS if kind.__name__ in ("Distribution_t", "PowerLaw_t")}
    return {"DataGenerator": tools.DataGenerator, "DataGeneratorParams": tools.DataGeneratorParams, **shown}


def _data() -> dict[str, Any]:
    shown = {kind.__name__: kind for kind in ENUMS if kind.__name__ in ("DataSourceType_t", "FileSystemType_t")}
    return {"DataSource": DataSource, "DataSourceParams": DataSourceParams, **shown}


def _inference() -> dict[str, Any]:
    names = ("DatabaseType_t", "Database_t", "DatabaseHashMapAlgorithm_t", "DatabaseOverflowPolicy_t",
             "UpdateSourceType_t", "DataReaderType_t", "Check_t")  # fmt: skip
    return {
        **{kind.__name__: kind for kind in ENUMS if kind.__name__ in names},
        "EmbeddingCacheType_t": EmbeddingCacheType_t,
        "InferenceParams": params.InferenceParams,
        "VolatileDatabaseParams": params.VolatileDatabaseParams,
        "PersistentDatabaseParams": params.PersistentDatabaseParams,
        "UpdateSourceParams": params.UpdateSourceParams,
        "ParameterServerConfig": params.ParameterServerConfig,
        "InferenceModel": serving.InferenceModel,
        "InferenceSession": serving.InferenceSession,
        "CreateInferenceSession": serving.InferenceSession,
        "CreateParameterServer": serving.ParameterServer,
        "CreateEmbeddingCache": serving.EmbeddingCache,
        "HPS": parameter_server.HPS,
    }


def _optimizer() -> dict[str, Any]:
    shown = {kind.__name__: kind for kind in ENUMS if kind.__name__ in ("Optimizer_t", "Update_t")}
    return {"CreateOptimizer": session.SessionOptParams, **shown}
