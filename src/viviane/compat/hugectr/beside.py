"""Packages that scripts import with HugeCTR: replacements if they are not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import torch

from viviane.compat.hugectr import tensorflow_lookup
from viviane.compat.hugectr.arguments import say
from viviane.compat.hugectr.enums import Layer_t
from viviane.compat.hugectr.onnx_converter import convert
from viviane.compat.hugectr.parameter_server import HPS
from viviane.compat.hugectr.processes import group, is_first, wait_for_all
from viviane.core.errors import ConfigError


class LookupLayer(torch.nn.Module):
    """hps_torch's layer: keys (...) to vectors (..., D), exact.

    Args:
        ps_config_file: the parameter server's JSON.
        model_name: name of the model in the JSON.
        table_id: index of the model's table, from 0.
        emb_vec_size: D.
    """

    def __init__(self, ps_config_file: str, model_name: str, table_id: int, emb_vec_size: int) -> None:
        super().__init__()
        self._server, self._place = HPS(ps_config_file), (model_name, table_id)
        self._width = emb_vec_size

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the vectors of keys, on the device of the keys.

        Raises:
            ConfigError: the width of the table differs.
        """
        found = torch.from_numpy(self._server.lookup(keys.cpu().numpy(), *self._place))
        if found.shape[1] != self._width:
            raise ConfigError("the width of the table differs", where="hps_torch.LookupLayer, emb_vec_size",
                              value=self._width, allowed=str(found.shape[1]))  # fmt: skip
        return found.view(*keys.shape, self._width).to(keys.device)


class _Logger:
    """MLPerf's logger: a line of JSON for each event, from rank 0."""

    def _log(self, kind: str, key: Any = None, value: Any = None, metadata: Any = None, **more: Any) -> None:
        if is_first():
            entry = {"time_ms": int(time.time() * 1000), "event_type": kind, "key": key, "value": value}
            say(f":::MLLOG {json.dumps({**entry, 'metadata': {**(metadata or {}), **more}}, default=str)}")

    def event(self, *args: Any, **given: Any) -> None:
        """Log a point in time."""
        self._log("POINT_IN_TIME", *args, **given)

    def start(self, *args: Any, **given: Any) -> None:
        """Log the start of an interval."""
        self._log("INTERVAL_START", *args, **given)

    def end(self, *args: Any, **given: Any) -> None:
        """Log the end of an interval."""
        self._log("INTERVAL_END", *args, **given)


class CommunicationHandler:
    """Rank and world size for MLPerf's loggers: one process, or those that torchrun started."""

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return group().rank

    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def num_nodes(self) -> int:
        """Return the number of machines."""
        return max(1, group().size // int(os.environ.get("LOCAL_WORLD_SIZE", str(group().size))))

    def world_size(self) -> int:
        """Return the number of processes."""
        return group().size

    def barrier(self) -> None:
        """Wait for all processes."""
        wait_for_all()


class LoggerWrapper(_Logger):
    """MLPerf's logger with the first and last lines of a submission.

    Args:
        comm_handler: supplies the rank.
        given: values written with every line.
    """

    def __init__(self, comm_handler: Any = None, **given: Any) -> None:
        self.comm_handler, self.given = comm_handler or CommunicationHandler(), given

    def log_init_stop_run_start(self) -> None:
        """Log the end of initialization and the start of the run."""
        self.end(key="init_stop")
        self.start(key="run_start")

    def log_run_stop(self, status: str = "success", **more: Any) -> None:
        """Log the end of the run and its status."""
        self.end(key="run_stop", metadata={"status": status, **more})

    def mlperf_submission_log(
        self, benchmark: str, num_nodes: int | None = None, org: str | None = None, platform: str | None = None
    ) -> None:
        """Log the submission's metadata."""
        facts = {"submission_benchmark": benchmark, "submission_org": org or "reference", "submission_division":
                 "closed", "submission_status": "onprem",
                 "submission_platform": platform or f"{num_nodes or self.comm_handler.num_nodes()} nodes"}  # fmt: skip
        for key, value in facts.items():
            self.event(key=key, value=value)


class _Constants(ModuleType):
    """MLPerf's constants: the value of each is its name in lower case."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()


def _hps_tensorflow() -> dict[str, ModuleType]:
    return {tensorflow_lookup.NAME: tensorflow_lookup.package()}


def _hps_torch() -> dict[str, ModuleType]:
    module = ModuleType("hps_torch")
    vars(module).update(LookupLayer=LookupLayer)
    return {"hps_torch": module}


def _mlperf_logging() -> dict[str, ModuleType]:
    package, mllog = ModuleType("mlperf_logging"), ModuleType("mlperf_logging.mllog")
    constants, logger = _Constants("mlperf_logging.mllog.constants"), _Logger()
    vars(mllog).update(
        constants=constants, get_mllogger=lambda: logger, config=lambda **given: None, MLLogger=_Logger, __path__=[]
    )
    vars(package).update(mllog=mllog, __path__=[])
    return {one.__name__: one for one in (package, mllog, constants)}


def _mlperf_common() -> dict[str, ModuleType]:
    package, logging = ModuleType("mlperf_common"), ModuleType("mlperf_common.logging")
    frameworks = ModuleType("mlperf_common.frameworks")
    vars(logging).update(MLLoggerWrapper=LoggerWrapper)
    vars(frameworks).update(__path__=[])
    vars(package).update(logging=logging, frameworks=frameworks, __path__=[])
    made = {one.__name__: one for one in (package, logging, frameworks)}
    for name, handlers in _HANDLERS.items():
        module = ModuleType(f"mlperf_common.frameworks.{name}")
        vars(module).update(dict.fromkeys(handlers, CommunicationHandler))
        setattr(frameworks, name, module)
        made[module.__name__] = module
    return made


_HANDLERS: Final = {
    "base": ("CommunicationHandler",),
    "hugectr": ("HCTRCommunicationHandler",),
    "mxnet": ("MPICommunicationHandler",),
    "pyt": ("PyTCommunicationHandler",),
}
"""The modules of MLPerf's frameworks, and the class that supplies the rank in each."""


def _hugectr2onnx() -> dict[str, ModuleType]:
    package, converter = ModuleType("hugectr2onnx"), ModuleType("hugectr2onnx.converter")
    loader = ModuleType("hugectr2onnx.hugectr_loader")
    vars(converter).update(convert=convert)
    vars(loader).update(ONNX_LAYER_TYPES=set(Layer_t.__members__), EXEMPTION_LAYER_TYPES=set())
    vars(package).update(converter=converter, hugectr_loader=loader, __path__=[])
    return {one.__name__: one for one in (package, converter, loader)}


_ANSWERED: Final[dict[str, Callable[[], dict[str, ModuleType]]]] = {
    "hierarchical_parameter_server": _hps_tensorflow, "hps_torch": _hps_torch, "hugectr2onnx": _hugectr2onnx,
    "mlperf_logging": _mlperf_logging, "mlperf_common": _mlperf_common,
}  # fmt: skip


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def packages() -> dict[str, ModuleType]:
    """Return replacements for the packages that are not installed, by name."""
    made: dict[str, ModuleType] = {}
    for name, make in _ANSWERED.items():
        if not _is_installed(name):
            made |= make()
    return made
