"""Training from HugeCTR's JSON alone: clauses solver, optimizer and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from viviane.compat.hugectr.arguments import note
from viviane.compat.hugectr.enums import MetricsType
from viviane.compat.hugectr.json_graph import optimizer_from_json, read_graph, reader_from_json
from viviane.compat.hugectr.model import Model
from viviane.compat.hugectr.reading import close_readers
from viviane.compat.hugectr.solver import Solver
from viviane.config.base import load_json
from viviane.core.errors import ConfigError, suggest

_SAME_NAMES: Final = ("batchsize", "batchsize_eval", "seed", "max_eval_batches", "enable_tf32_compute")
_SCHEDULE: Final = ("warmup_steps", "decay_start", "decay_steps", "decay_power", "end_lr")
_FIT: Final = ("max_iter", "num_epochs", "display", "eval_interval", "snapshot", "snapshot_prefix")
_OTHERS: Final = (
    "lr_policy", "gpu", "eval_batches", "mixed_precision", "eval_metrics", "input_key_type", "algorithm_search",
    "cuda_graph", "dense_model_file", "sparse_model_file", "auc_threshold", "model_file",
)  # fmt: skip


def train_from_json(file: str | Path) -> Model:
    """Train as HugeCTR's command line did, and return the model.

    Raises:
        ConfigError: a clause is missing, or a key is unknown.
    """
    content = load_json(file)
    for clause in ("solver", "optimizer", "layers"):
        if clause not in content:
            raise ConfigError("a clause is missing", where=str(file), value=clause)
    clause = content["solver"]
    known = (*_SAME_NAMES, *_FIT, *_OTHERS)
    for key in clause:
        if key not in known:
            raise ConfigError("unknown key", where=f"{file}, solver", value=key, fix=suggest(key, known))
    solver = _solver(clause, content["optimizer"])
    model = Model(solver, reader_from_json(content["layers"][0]), optimizer_from_json(content["optimizer"]))
    for layer in read_graph(file, include_dense_network=True):
        model.add(layer)
    model.compile()
    model.summary()
    dense = clause.get("dense_model_file") or clause.get("model_file")
    if dense:
        model.load_dense_weights(dense)
    if clause.get("sparse_model_file"):
        model.load_sparse_weights(clause["sparse_model_file"])
    try:
        model.fit(**{name: clause[name] for name in _FIT if name in clause})
    finally:
        close_readers()
    return model


def _solver(clause: dict[str, Any], optimizer: dict[str, Any]) -> Solver:
    given: dict[str, Any] = {name: clause[name] for name in _SAME_NAMES if name in clause}
    hparam: dict[str, Any] = next((value for key, value in optimizer.items() if key.endswith("_hparam")), {})
    given["lr"] = hparam.get("learning_rate", hparam.get("alpha", 0.001))
    given |= {name: hparam[name] for name in _SCHEDULE if name in hparam}
    if "eval_batches" in clause:
        given["max_eval_batches"] = clause["eval_batches"]
    if "gpu" in clause:
        devices = clause["gpu"]
        given["vvgpu"] = devices if devices and isinstance(devices[0], list) else [devices]
    if clause.get("mixed_precision"):
        given["use_mixed_precision"] = True
    metrics = clause.get("eval_metrics", ["AUC:1.0"])
    pairs = (one.partition(":") for one in metrics)
    given["metrics_spec"] = {MetricsType[name]: float(limit or "inf") for name, _, limit in pairs}
    if "auc_threshold" in clause:
        given["metrics_spec"][MetricsType.AUC] = float(clause["auc_threshold"])
    given["i64_input_key"] = clause.get("input_key_type", "I32") == "I64"
    given["repeat_dataset"] = "num_epochs" not in clause
    for name in ("algorithm_search", "cuda_graph"):
        if name in clause:
            note("solver", name)
    return Solver(**given)
