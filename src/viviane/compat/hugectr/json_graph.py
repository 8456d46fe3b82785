"""HugeCTR's JSON of a graph, as graph_to_json writes and construct_from_json reads it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from viviane.compat.hugectr.arguments import note
from viviane.compat.hugectr.collection import EmbeddingCollectionConfig, EmbeddingTableConfig
from viviane.compat.hugectr.enums import Alignment_t, Check_t, DataReaderType_t, Embedding_t
from viviane.compat.hugectr.graph import Graph
from viviane.compat.hugectr.inputs import (
    AsyncParam,
    DataReaderParams,
    DataReaderSparseParam,
    HybridEmbeddingParam,
    Input,
    SparseEmbedding,
)
from viviane.compat.hugectr.json_files import check_keys
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.json_first import layers_of_2_0
from viviane.compat.hugectr.json_layers import layer_from_json, layer_to_json
from viviane.compat.hugectr.json_optimizer import optimizer_from_json, optimizer_to_json
from viviane.compat.hugectr.names import script_name
from viviane.compat.hugectr.solver import Solver
from viviane.core.errors import ConfigError
from viviane.core.files import write_json_atomic
from viviane.core.json_files import expected_form

Member = TypeVar("Member", bound=Enum)

_EMBEDDING_SPELLINGS: Final = {
    "SparseEmbedding": "DistributedSlotSparseEmbeddingHash",
    "SparseEmbeddingHash": "DistributedSlotSparseEmbeddingHash",
    "HybridEmbedding": "HybridSparseEmbedding",
}
_SIZED: Final = ("LocalizedSlotSparseEmbeddingOneHot", "HybridSparseEmbedding")
_HYBRID: Final = tuple(HybridEmbeddingParam.signature.defaults)
_READER: Final = ("slot_size_array", "num_samples", "eval_num_samples", "cache_eval_data", "float_label_dense",
                  "keyset", "num_workers", "read_file_sequentially")  # fmt: skip
_DATA: Final = (*_READER, "name", "type", "top", "format", "source", "eval_source", "check", "label", "dense", "sparse",
                "async_param", "label_dim", "slot_num", "max_feature_num_per_sample")  # fmt: skip
"""Keys of a Data layer; the last three are from 2.0."""
_EMBEDDINGS: Final = tuple(member.name for member in Embedding_t)


def write_graph(file: str | Path, graph: Graph, solver: Solver, reader: DataReaderParams) -> None:
    """Write a graph."""
    layers: list[dict[str, Any]] = [_data_to_json(graph.given, reader)]
    for one in graph.added:
        if isinstance(one, SparseEmbedding):
            layers.append(_embedding_to_json(one))
        elif isinstance(one, EmbeddingCollectionConfig):
            layers.append(collection_to_json(one))
        else:
            layers.append(layer_to_json(one))
    write_json_atomic(Path(file), {"model_name": solver.model_name, "layers": layers})


def read_graph(file: str | Path, include_dense_network: bool) -> list[Any]:
    """Return the Input, the embeddings, and the dense layers if requested.

    Raises:
        ConfigError: the file is not JSON of a graph.
    """
    return graph_layers(load_json(file), include_dense_network, str(file))


def graph_layers(content: Any, include_dense_network: bool, where: str) -> list[Any]:
    """Return the layers of a parsed graph."""
    with expected_form(where):
        layers = with_data_layer(content, where)
    result: list[Any] = []
    for number, one in enumerate(layers):
        name = one.get("name", one.get("top", "")) if isinstance(one, dict) else number
        with expected_form(f"{where}, layer {name!r}"):
            found = _read_layer(one, layers[0], include_dense_network)
        result += [] if found is None else [found]
    return result


def _read_layer(one: dict[str, Any], data: dict[str, Any], include_dense_network: bool) -> Any:
    """Return the Input, the embedding or the layer of an object, None for a dense layer that is not requested."""
    if one is data:
        return input_from_json(one)
    kind = _EMBEDDING_SPELLINGS.get(one["type"], one["type"])
    if kind in _EMBEDDINGS:
        return _embedding_from_json({**one, "type": kind}, data)
    if kind == "EmbeddingCollection":
        return collection_from_json(one)
    return layer_from_json(one) if include_dense_network else None


def with_data_layer(content: Any, where: str) -> list[dict[str, Any]]:
    """Return the layers, the Data layer first; in 2.0 it was a separate clause.

    Raises:
        ConfigError: there is no Data layer.
    """
    layers = content.get("layers") if isinstance(content, dict) else None
    if layers and "data" in content:
        layers = layers_of_2_0(content["data"], layers, where)
    if not layers or layers[0].get("type", "Data") != "Data":
        raise ConfigError("the first layer of a graph must be Data", where=where)
    return [_with_sizes(one) if isinstance(one, dict) else one for one in layers]


def _with_sizes(one: dict[str, Any]) -> dict[str, Any]:
    """Return a layer with slot_size_array instead of slot_size, the name before 2.2.1."""
    return {"slot_size_array" if key == "slot_size" else key: value for key, value in one.items()}


def input_from_json(data: dict[str, Any]) -> Input:
    """Return the Input of a Data layer."""
    check_keys(data, _DATA, "layer Data")
    label, dense = data.get("label", {}), data.get("dense", {})
    labels: dict[str, Any] = {"label_dim": label.get("label_dim", 1), "label_name": label.get("top", "label")}
    if isinstance(labels["label_name"], list):
        labels = {"label_dims": label["label_dim"], "label_names": label["top"]}
    raw = str(data.get("format", "Norm")).startswith("Raw")
    sparse = [
        DataReaderSparseParam(one["top"], _nnz(one, raw), one.get("is_fixed_length", False), one["slot_num"])
        for one in data.get("sparse", [])
    ]
    return Input(
        dense_dim=dense.get("dense_dim", 0), dense_name=dense.get("top", "dense"),
        data_reader_sparse_param_array=sparse, **labels,
    )  # fmt: skip


def _nnz(one: dict[str, Any], raw: bool) -> Any:
    """Return the maximum keys of a slot; before 3.1 that of a row limits each slot."""
    for name in ("nnz_per_slot", "max_nnz"):
        if name in one:
            return one[name]
    return 1 if raw else one.get("max_feature_num_per_sample", 1)


def reader_from_json(data: dict[str, Any]) -> DataReaderParams:
    """Return the reader's parameters of a Data layer.

    Raises:
        ConfigError: the layer has no source.
    """
    check = _word("check", data.get("check", "None"), Check_t)
    kind = _word("format", data.get("format", "Norm"), DataReaderType_t)
    given: dict[str, Any] = {name: data[name] for name in _READER if name in data}
    if "async_param" in data:
        given["async_param"] = _async_param(data["async_param"])
    if "source" not in data:
        raise ConfigError("the Data layer has no source", fix='add "source" and "eval_source" to it')
    return DataReaderParams(
        data_reader_type=kind, source=data["source"], eval_source=data.get("eval_source", ""), check_type=check,
        **given,
    )  # fmt: skip


def _word(key: str, value: Any, kind: type[Member]) -> Member:
    """Return the member that a word of the Data layer names; HugeCTR's JSON has "None" for Python's `Non`."""
    words = {"None" if one.name == "Non" else one.name: one for one in kind}
    if not isinstance(value, str) or value not in {*words, "Non"}:
        raise ConfigError("unknown word", where=f"layer Data, {key}", value=value, allowed=", ".join(words))
    return words["None" if value == "Non" else value]


def _async_param(clause: dict[str, Any]) -> AsyncParam:
    values = dict(clause)
    if "io_block_size" in values:
        values["max_num_requests_per_thread"] = values.pop("io_block_size")
    if isinstance(values.get("aligned_type"), str):
        values["aligned_type"] = _word("async_param, aligned_type", values["aligned_type"], Alignment_t)
    return AsyncParam(**{"num_threads": 1, "num_batches_per_thread": 1, **values})


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
            "top": script_name(given.label_names if several else given.label_name),
            "label_dim": given.label_dims if several else given.label_dim,
        },
        "dense": {"top": script_name(given.dense_name), "dense_dim": given.dense_dim},
        "sparse": [
            {"top": script_name(one.top_name), "slot_num": one.slot_num, "is_fixed_length": one.is_fixed_length,
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
        "name": script_name(one.sparse_embedding_name), "type": one.embedding_type.name,
        "bottom": script_name(one.bottom_name), "top": script_name(one.sparse_embedding_name),
        "sparse_embedding_hparam": hparam,
    }  # fmt: skip
    return result if one.optimizer is None else {**result, "optimizer": optimizer_to_json(one.optimizer)}


def _embedding_from_json(one: dict[str, Any], data: dict[str, Any]) -> SparseEmbedding:
    hparam = one["sparse_embedding_hparam"]
    known = {
        "embedding_vec_size", "combiner", "workspace_size_per_gpu_in_mb", "slot_size_array",
        "max_vocabulary_size_per_gpu", "max_vocabulary_size_global", "vocabulary_size", "load_factor",
    }  # fmt: skip
    check_keys(hparam, {*known, *_HYBRID}, f"embedding {one.get('name', one['top'])!r}")
    sizes = list(hparam.get("slot_size_array", one.get("slot_size_array", [])))
    if not sizes and one["type"] in _SIZED:
        sizes = list(data.get("slot_size_array", []))
    if "plan_file" in one:
        note("embedding", "plan_file")
    return SparseEmbedding(
        embedding_type=Embedding_t[one["type"]], embedding_vec_size=hparam["embedding_vec_size"],
        workspace_size_per_gpu_in_mb=hparam.get("workspace_size_per_gpu_in_mb", 0),
        combiner=hparam.get("combiner", "sum"), sparse_embedding_name=one["top"], bottom_name=one["bottom"],
        slot_size_array=sizes, optimizer=optimizer_from_json(one["optimizer"]) if "optimizer" in one else None,
    )  # fmt: skip


def collection_to_json(given: EmbeddingCollectionConfig) -> dict[str, Any]:
    """Return an embedding collection as JSON; HugeCTR has no such JSON."""
    tables = [
        {
            "name": one.name, "max_vocabulary_size": one.max_vocabulary_size, "ev_size": one.ev_size,
            **({} if one.optimizer is None else {"optimizer": optimizer_to_json(one.optimizer)}),
        }
        for one in given.tables.values()
    ]  # fmt: skip
    calls = [
        {
            "top": script_name(call.top),
            "list": call.is_list,
            "lookups": [[one.table.name, script_name(one.bottom), one.combiner] for one in call.lookups],
        }
        for call in given.calls
    ]
    return {"name": "embedding_collection", "type": "EmbeddingCollection", "tables": tables, "embedding_lookup": calls}


def collection_from_json(one: dict[str, Any]) -> EmbeddingCollectionConfig:
    """Return the collection that `collection_to_json` wrote."""
    tables = {}
    for table in one["tables"]:
        given = dict(table)
        if "optimizer" in given:
            given["opt_params_or_empty"] = optimizer_from_json(given.pop("optimizer"))
        tables[table["name"]] = EmbeddingTableConfig(**given)
    result = EmbeddingCollectionConfig()
    for call in one["embedding_lookup"]:
        names, bottoms, combiners = (list(part) for part in zip(*call["lookups"], strict=True))
        chosen = [tables[name] for name in names]
        if call["list"]:
            result.embedding_lookup(chosen, bottoms, call["top"], combiners)
        else:
            result.embedding_lookup(chosen[0], bottoms[0], call["top"], combiners[0])
    return result
