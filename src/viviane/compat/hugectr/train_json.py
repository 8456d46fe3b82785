"""Training from HugeCTR's JSON: clauses solver, optimizer and layers, or only a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

from viviane.compat.hugectr.arguments import note, say
from viviane.compat.hugectr.enums import MetricsType
from viviane.compat.hugectr.json_files import check_keys
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.json_graph import graph_layers, reader_from_json, with_data_layer
from viviane.compat.hugectr.json_optimizer import optimizer_from_json, schedule_from_json
from viviane.compat.hugectr.model import Model
from viviane.compat.hugectr.reading import close_readers, open_readers
from viviane.compat.hugectr.solver import OptParams, Solver
from viviane.core.errors import ConfigError
from viviane.core.json_files import expected_form

AnySolver = TypeVar("AnySolver", bound=Solver)
_SAME_NAMES: Final = (
    "batchsize",
    "batchsize_eval",
    "seed",
    "max_eval_batches",
    "enable_tf32_compute",
    "model_name",
    "num_iterations_statistics",
    "perf_logging",
    "grouped_all_reduce",
    "async_mlp_wgrad",
    "overlap_lr",
    "overlap_init_wgrad",
    "overlap_ar_a2a",
    "is_dlrm",
    "repeat_dataset",
    "drop_incomplete_batch",
    "use_overlapped_pipeline",
    "use_holistic_cuda_graph",
)
_FIT: Final = ("max_iter", "num_epochs", "display", "eval_interval", "snapshot", "snapshot_prefix")
_WEIGHTS: Final = ("dense_model_file", "model_file", "sparse_model_file", "dense_opt_states_file",
                   "sparse_opt_states_file")  # fmt: skip
_UNUSED: Final = ("algorithm_search", "cuda_graph", "all_reduce_algo", "device_layout", "scaler", "plan_file",
                  "gen_loss_summary", "use_mixed_precision")  # fmt: skip
_OTHERS: Final = ("lr_policy", "gpu", "eval_batches", "max_eval_samples", "mixed_precision", "eval_metrics",
                  "input_key_type", "auc_threshold", "export_predictions_prefix")  # fmt: skip
_ELSE: Final = {
    "models": "it is for a parameter server; pass it to hugectr.inference.HPS in a script",
    "plan": "it is a sharding plan; train the file that refers to it as plan_file",
    "slot_size_array": "it describes data; generate them with `viviane data generate`, or hugectr.tools.DataGenerator",
}
"""Keys of other JSON files, with suggestions."""


def train_from_json(file: str | Path) -> Model:
    """Train as HugeCTR's command line did, and return the model.

    A graph without other clauses, as from graph_to_json, is trained with the defaults of CreateSolver, CreateOptimizer
    and fit; without a source in its Data layer it is only described.

    Raises:
        ConfigError: the file has no layers.
    """
    content = load_json(file)
    if not isinstance(content, dict) or "layers" not in content:
        keys: Any = content if isinstance(content, dict) else {"plan": None}  # a list: one entry per GPU
        fix = next(
            (text for key, text in _ELSE.items() if key in keys), "pass a file with solver, optimizer and layers"
        )
        raise ConfigError("the file has no layers to train", where=str(file), fix=fix)
    with expected_form(str(file)):
        clause = _solver_clause(content)
    check_keys(clause, (*_SAME_NAMES, *_FIT, *_OTHERS, *_WEIGHTS, *_UNUSED), f"{file}, solver")
    optimizer = content.get("optimizer", {"type": "Adam"})
    with expected_form(str(file)):
        data = with_data_layer(content, str(file))[0]
    layers = graph_layers(content, include_dense_network=True, where=str(file))
    with expected_form(str(file)):
        solver, rule = solver_from_json(content, Solver), optimizer_from_json(optimizer)
        reader = reader_from_json(data) if "source" in data else None
    if reader is None:
        return _describe(solver, rule, layers, file)
    model, others = Model(solver, reader, rule), open_readers()
    for layer in layers:
        model.add(layer)
    try:
        model.compile()
        model.summary()
        _load(model, clause)
        model.fit(**{name: clause[name] for name in _FIT if name in clause})
        if "export_predictions_prefix" in clause:
            prefix = clause["export_predictions_prefix"]
            model.export_predictions(f"{prefix}_prediction.txt", f"{prefix}_label.txt")
    finally:
        close_readers(but=others)
    return model


def _describe(solver: Solver, rule: OptParams, layers: list[Any], file: str | Path) -> Model:
    """Return the uncompiled model of a graph without data, after checking the graph."""
    model = Model(solver, None, rule)
    for layer in layers:
        model.add(layer)
    say(f"{file}: the Data layer has no source, so there is nothing to train; the graph has {len(layers)} layers")
    return model


def _load(model: Model, clause: dict[str, Any]) -> None:
    dense = clause.get("dense_model_file") or clause.get("model_file")
    if dense:
        model.load_dense_weights(dense)
    if clause.get("sparse_model_file"):
        model.load_sparse_weights(clause["sparse_model_file"])
    if clause.get("dense_opt_states_file"):
        model.load_dense_optimizer_states(clause["dense_opt_states_file"])
    if clause.get("sparse_opt_states_file"):
        model.load_sparse_optimizer_states(clause["sparse_opt_states_file"])


def _solver_clause(content: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(" ", "_"): value for name, value in content.get("solver", {}).items()}


def solver_from_json(content: dict[str, Any], kind: type[AnySolver]) -> AnySolver:
    """Return the solver of the clauses solver and optimizer of a JSON file."""
    clause, optimizer = _solver_clause(content), content.get("optimizer", {"type": "Adam"})
    given: dict[str, Any] = {name: clause[name] for name in _SAME_NAMES if name in clause}
    given |= schedule_from_json(optimizer)
    given.setdefault("model_name", content.get("model_name", ""))
    given.setdefault("batchsize_eval", given.get("batchsize", 2048))
    if "eval_batches" in clause:
        given["max_eval_batches"] = clause["eval_batches"]
    if "max_eval_samples" in clause:
        given["max_eval_batches"] = -(-clause["max_eval_samples"] // given["batchsize_eval"])
    if "gpu" in clause:
        devices = clause["gpu"]
        given["vvgpu"] = devices if devices and isinstance(devices[0], list) else [devices]
    if clause.get("mixed_precision") or clause.get("use_mixed_precision"):
        given["use_mixed_precision"] = True
    metrics = clause.get("eval_metrics", ["AUC:1.0"])
    pairs = (str(one).partition(":") for one in ([metrics] if isinstance(metrics, str) else metrics))
    given["metrics_spec"] = {MetricsType[name.strip()]: float(limit or "inf") for name, _, limit in pairs}
    if "auc_threshold" in clause:
        given["metrics_spec"][MetricsType.AUC] = float(clause["auc_threshold"])
    given["i64_input_key"] = clause.get("input_key_type", "I32") == "I64"
    given.setdefault("repeat_dataset", "num_epochs" not in clause or bool(clause.get("max_iter")))
    for name in _UNUSED:
        if name in clause:
            note("solver", name)
    return kind(**given)
