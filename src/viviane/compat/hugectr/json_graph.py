"""HugeCTR's JSON of a graph: what graph_to_json writes and construct_from_json reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from viviane.compat.hugectr.enums import Check_t, DataReaderType_t, Embedding_t, Optimizer_t, Update_t
from viviane.compat.hugectr.graph import Graph
from viviane.compat.hugectr.inputs import AsyncParam, DataReaderParams, DataReaderSparseParam, Input, SparseEmbedding
from viviane.compat.hugectr.json_layers import layer_from_json, layer_to_json
from viviane.compat.hugectr.layers import DenseLayer
from viviane.compat.hugectr.solver import OptParams, Solver
from viviane.config.base import load_json
from viviane.core.errors import ConfigError, suggest
from viviane.core.files import write_json_atomic

_EMBEDDINGS: Final = tuple(member.name for member in Embedding_t)
_HPARAMS: Final = {
    "Adam": ("adam_hparam", ("beta1", "beta2", "epsilon")),
    "AdaGrad": ("adagrad_hparam", ("initial_accu_value", "epsilon")),
    "MomentumSGD": ("momentum_sgd_hparam", ("momentum_factor",)),
    "Nesterov": ("nesterov_hparam", ("momentum_factor",)),
    "SGD": ("sgd_hparam", ("atomic_update",)),
    "Ftrl": ("ftrl_hparam", ("beta", "lambda1", "lambda2")),
}
"""The section of each optimizer, and what of CreateOptimizer's stands in it."""


def write_graph(file: str | Path, graph: Graph, solver: Solver, reader: DataReaderParams) -> None:
    """Write a graph."""
    layers: list[dict[str, Any]] = [_data_to_json(graph.given, reader)]
    for one in graph.added:
        layers.append(_embedding_to_json(one) if isinstance(one, SparseEmbedding) else layer_to_json(one))
    write_json_atomic(Path(file), {"model_name": solver.model_name, "layers": layers})


def read_graph(file: str | Path, include_dense_network: bool) -> list[Input | SparseEmbedding | DenseLayer]:
    """Return the Input, the embeddings, and the dense layers if asked for.

    Raises:
        ConfigError: the file is not such JSON, or holds an unknown key.
    """
    content = load_json(file)
    layers = content.get("layers") if isinstance(content, dict) else None
    if not layers or layers[0].get("type", "Data") != "Data":
        raise ConfigError("the graph's first layer is its Data", where=str(file))
    result: list[Input | SparseEmbedding | DenseLayer] = [input_from_json(layers[0])]
    for one in layers[1:]:
        if one["type"] in _EMBEDDINGS:
            result.append(_embedding_from_json(one))
        elif include_dense_network:
            result.append(layer_from_json(one))
    return result


def input_from_json(data: dict[str, Any]) -> Input:
    """Return the Input of a Data layer."""
    label, dense = data["label"], data["dense"]
    labels: dict[str, Any] = {"label_dim": label["label_dim"], "label_name": label["top"]}
    if isinstance(label["top"], list):
        labels = {"label_dims": label["label_dim"], "label_names": label["top"]}
    sparse = [
        DataReaderSparseParam(
            one["top"], one.get("nnz_per_slot", one.get("max_nnz", 1)), one.get("is_fixed_length", False),
            one["slot_num"],
        )
        for one in data["sparse"]
    ]  # fmt: skip
    return Input(dense_dim=dense["dense_dim"], dense_name=dense["top"], data_reader_sparse_param_array=sparse, **labels)


def reader_from_json(data: dict[str, Any]) -> DataReaderParams:
    """Return the reader's parameters of a Data layer."""
    check = {"Sum": Check_t.Sum}.get(data.get("check", "None"), Check_t.Non)
    kind = DataReaderType_t[data.get("format", "Norm")]
    names = ("slot_size_array", "num_samples", "eval_num_samples", "cache_eval_data", "float_label_dense")
    given: dict[str, Any] = {name: data[name] for name in names if name in data}
    if "async_param" in data:
        given["async_param"] = AsyncParam(**data["async_param"])
    return DataReaderParams(
        data_reader_type=kind, source=data["source"], eval_source=data["eval_source"], check_type=check, **given
    )


def _data_to_json(given: Input, reader: DataReaderParams) -> dict[str, Any]:
    several = given.label_names is not None
    source = reader.sources
    return {
        "name": "data",
        "type": "Data",
        "format": reader.data_reader_type.name,
        "source": source[0] if len(source) == 1 else source,
        "eval_source": reader.eval_source,
        "check": "Sum" if reader.check_type is Check_t.Sum else "None",
        "slot_size_array": list(reader.slot_size_array),
        "num_samples": reader.num_samples,
        "eval_num_samples": reader.eval_num_samples,
        "float_label_dense": reader.float_label_dense,
        "label": {
            "top": given.label_names if several else given.label_name,
            "label_dim": given.label_dims if several else given.label_dim,
        },
        "dense": {"top": given.dense_name, "dense_dim": given.dense_dim},
        "sparse": [
            {"top": one.top_name, "slot_num": one.slot_num, "is_fixed_length": one.is_fixed_length,
             "nnz_per_slot": one.nnz_per_slot}
            for one in given.sparse
        ],
    }  # fmt: skip


def _embedding_to_json(one: SparseEmbedding) -> dict[str, Any]:
    hparam = {
        "embedding_vec_size": one.embedding_vec_size,
        "combiner": one.combiner,
        "workspace_size_per_gpu_in_mb": one.workspace_size_per_gpu_in_mb,
        "slot_size_array": list(one.slot_size_array),
    }
    result = {
        "name": one.sparse_embedding_name, "type": one.embedding_type.name, "bottom": one.bottom_name,
        "top": one.sparse_embedding_name, "sparse_embedding_hparam": hparam,
    }  # fmt: skip
    return result if one.optimizer is None else {**result, "optimizer": optimizer_to_json(one.optimizer)}


def _embedding_from_json(one: dict[str, Any]) -> SparseEmbedding:
    hparam = one["sparse_embedding_hparam"]
    known = {
        "embedding_vec_size", "combiner", "workspace_size_per_gpu_in_mb", "slot_size_array",
        "max_vocabulary_size_per_gpu", "max_vocabulary_size_global", "vocabulary_size", "load_factor",
    }  # fmt: skip
    for key in hparam:
        if key not in known:
            raise ConfigError("unknown key", where=f"embedding {one['name']!r}", value=key, fix=suggest(key, known))
    return SparseEmbedding(
        embedding_type=Embedding_t[one["type"]], embedding_vec_size=hparam["embedding_vec_size"],
        workspace_size_per_gpu_in_mb=hparam.get("workspace_size_per_gpu_in_mb", 0), combiner=hparam["combiner"],
        sparse_embedding_name=one["top"], bottom_name=one["bottom"],
        slot_size_array=list(hparam.get("slot_size_array", [])),
        optimizer=optimizer_from_json(one["optimizer"]) if "optimizer" in one else None,
    )  # fmt: skip


def optimizer_to_json(given: OptParams) -> dict[str, Any]:
    """Return an optimizer as a clause of JSON.

    Example:
        >>> optimizer_to_json(OptParams(optimizer_type=Optimizer_t.SGD, update_type=Update_t.Local))
        {'type': 'SGD', 'update_type': 'Local', 'sgd_hparam': {'atomic_update': True}}
    """
    kind = given.optimizer_type.name
    section, names = _HPARAMS[kind]
    values = {name: getattr(given, name) for name in names}
    return {"type": kind, "update_type": given.update_type.name, section: values}


def optimizer_from_json(clause: dict[str, Any]) -> OptParams:
    """Return the optimizer of a clause; a learning rate in it belongs to the solver.

    Raises:
        ConfigError: an unknown optimizer.
    """
    kind = clause.get("type")
    if kind not in _HPARAMS:
        raise ConfigError("unknown optimizer", where="optimizer", value=kind, fix=suggest(str(kind), _HPARAMS))
    section, names = _HPARAMS[kind]
    given = {name: clause.get(section, {})[name] for name in names if name in clause.get(section, {})}
    update = clause.get("update_type", "Global" if clause.get("global_update") else "Local")
    return OptParams(optimizer_type=Optimizer_t[kind], update_type=Update_t[update], **given)
