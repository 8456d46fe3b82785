"""HugeCTR's parameter files: dense weights in one file, a folder of keys and vectors for each embedding.

<prefix>_dense_<iter>.model             float32, layer after layer in the order of the graph
<prefix>_dense_<iter>.model.ntp.json    running statistics of BatchNorm, in the same order
<prefix><i>_sparse_<iter>.model/        key: int64; emb_vector: float32, a row for each key;
                                        slot_id: uint64, where the embedding has slot_size_array
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viviane.compat.hugectr.columns import Columns, Slot
from viviane.config.base import load_json
from viviane.core.errors import CheckpointError, ConfigError, suggest
from viviane.core.files import write_bytes_atomic
from viviane.embedding import EmbeddingCollection, TableState
from viviane.embedding.dynamic_content import DynamicContent
from viviane.model import DenseLayer, Model, SparseEmbedding

_TRANSPOSED = ("InnerProduct", "FusedInnerProduct", "GroupFusedInnerProduct", "MLP")


def save(model: Model, columns: Columns, prefix: str, iteration: int) -> None:
    """Write all weights of a model.

    Raises:
        ConfigError: a layer's weights have no known place in HugeCTR's file.
    """
    dense = Path(f"{prefix}_dense_{iteration}.model")
    dense.parent.mkdir(parents=True, exist_ok=True)
    parts = [_as_stored(kind, weight).detach().cpu().numpy().tobytes() for kind, weight in _weights(model)]
    write_bytes_atomic(dense, b"".join(parts))
    write_bytes_atomic(Path(f"{dense}.ntp.json"), json.dumps({"layers": _statistics(model)}).encode())
    for number, node in enumerate(_embeddings(model)):
        folder = Path(f"{prefix}{number}_sparse_{iteration}.model")
        folder.mkdir(parents=True, exist_ok=True)
        keys, vectors, slots = _table(_collection(model, node), _slots(node, columns))
        write_bytes_atomic(folder / "key", keys.astype("<i8").tobytes())
        write_bytes_atomic(folder / "emb_vector", vectors.astype("<f4").tobytes())
        if slots is not None:
            write_bytes_atomic(folder / "slot_id", slots.astype("<u8").tobytes())


def load_dense(model: Model, file: str | Path) -> None:
    """Read dense weights, and running statistics where they stand beside them.

    Raises:
        CheckpointError: the file is missing, or of another graph.
    """
    path = Path(file)
    if not path.is_file():
        raise CheckpointError("no such file of dense weights", where=str(path))
    values = torch.from_numpy(np.fromfile(path, "<f4").astype(np.float32))
    weights = list(_weights(model))
    wanted = sum(weight.numel() for _, weight in weights)
    if path.stat().st_size != 4 * wanted:
        raise CheckpointError("the file holds another number of weights than the graph", where=str(path),
                              value=path.stat().st_size // 4, allowed=str(wanted))  # fmt: skip
    start = 0
    with torch.no_grad():
        for kind, weight in weights:
            stored = _as_stored(kind, weight)
            part = values[start : start + weight.numel()].view(stored.shape)
            stored_back = part.T if kind in _TRANSPOSED and weight.dim() == 2 else part
            weight.copy_(stored_back)
            start += weight.numel()
    beside = Path(f"{path}.ntp.json")
    if beside.is_file():
        _load_statistics(model, load_json(beside)["layers"], beside)


def load_sparse(model: Model, columns: Columns, given: Sequence[str] | Mapping[str, str]) -> None:
    """Replace tables by what folders hold: one for each embedding in order, or by name.

    Raises:
        ConfigError: another number of folders, or an unknown name. CheckpointError: a folder is not right.
    """
    nodes = {node.name: node for node in _embeddings(model)}
    if not isinstance(given, Mapping):
        names = [given] if isinstance(given, str) else list(given)
        if len(names) != len(nodes):
            raise ConfigError("one folder for each embedding", where="load_sparse_weights", value=names,
                              allowed=f"{len(nodes)}: {', '.join(nodes)}")  # fmt: skip
        given = dict(zip(nodes, names, strict=True))
    for name, folder in given.items():
        if name not in nodes:
            raise ConfigError("no such embedding", where="load_sparse_weights", value=name, fix=suggest(name, nodes))
        node = nodes[name]
        keys, vectors = _read_folder(Path(folder), node.dim)
        _replace(_collection(model, node), _slots(node, columns), keys, vectors, Path(folder))


def _embeddings(model: Model) -> list[SparseEmbedding]:
    return [node for node in model.nodes if isinstance(node, SparseEmbedding)]


def _layers(model: Model) -> Iterator[tuple[str, torch.nn.Module]]:
    for node in model.nodes:
        if isinstance(node, DenseLayer) and node.name in model.module._modules:
            yield node.type, model.module._modules[node.name]  # type: ignore[misc]


def _weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in HugeCTR's order."""
    for kind, layer in _layers(model):
        found = dict(layer.named_parameters())
        if kind == "GRU":
            raise ConfigError("GRU's weights are packed by cuDNN, in an order that is not mapped", where=kind,
                              fix="save with viviane.Model.save")  # fmt: skip
        if kind == "MultiCross":  # layer after layer, each weight before its bias
            count = sum(name.startswith("biases.") for name in found)
            names = [f"{part}.{i}" for i in range(count) for part in ("weights", "projections", "biases")]
            found = {name: found[name] for name in names if name in found}
        yield from ((kind, weight) for weight in found.values())


def _as_stored(kind: str, weight: Tensor) -> Tensor:
    """Return a weight as HugeCTR lays it out: those of fully connected layers are (inputs, outputs)."""
    return weight.T.contiguous() if kind in _TRANSPOSED and weight.dim() == 2 else weight


def _norms(model: Model) -> list[Any]:
    return [part for kind, layer in _layers(model) if kind == "BatchNorm" for part in layer.modules()
            if hasattr(part, "running_mean")]  # fmt: skip


def _statistics(model: Model) -> list[dict[str, Any]]:
    return [
        {"type": "BatchNorm", "mean": norm.running_mean.tolist(), "var": norm.running_var.tolist()}
        for norm in _norms(model)
    ]


def _load_statistics(model: Model, given: list[dict[str, Any]], path: Path) -> None:
    norms = _norms(model)
    if len(norms) != len(given):
        raise CheckpointError("statistics of another number of BatchNorm layers", where=str(path), value=len(given),
                              allowed=str(len(norms)))  # fmt: skip
    for norm, values in zip(norms, given, strict=True):
        norm.running_mean.copy_(torch.tensor(values["mean"]))
        norm.running_var.copy_(torch.tensor(values["var"]))


def _collection(model: Model, node: SparseEmbedding) -> EmbeddingCollection:
    found = model.module._modules[node.name]
    assert isinstance(found, EmbeddingCollection)
    return found


def _slots(node: SparseEmbedding, columns: Columns) -> list[Slot]:
    return [slot for slot in columns.slots if slot.group == node.bottom]


def _table(collection: EmbeddingCollection, slots: Sequence[Slot]) -> tuple[Any, Any, Any]:
    """Return keys, vectors, and the slot of each key or None where slots share a table."""
    if slots[0].size is None:
        content = collection.dynamic_table(slots[0].group).export()
        return content.keys.cpu().numpy(), content.weight.float().cpu().numpy(), None
    keys, vectors, places = [], [], []
    for place, slot in enumerate(slots):
        vectors.append(collection.table_rows(slot.column)[1:].float().cpu().numpy())
        keys.append(slot.offset + np.arange(slot.size or 0))
        places.append(np.full(slot.size or 0, place))
    return np.concatenate(keys), np.concatenate(vectors), np.concatenate(places)


def _read_folder(folder: Path, dim: int) -> tuple[Any, Any]:
    for name in ("key", "emb_vector"):
        if not (folder / name).is_file():
            raise CheckpointError("a file of the table is missing", where=str(folder / name))
    keys, vectors = np.fromfile(folder / "key", "<i8"), np.fromfile(folder / "emb_vector", "<f4")
    if vectors.size != keys.size * dim:
        raise CheckpointError("keys and vectors do not fit together", where=str(folder), value=f"{keys.size} keys, "
                              f"{vectors.size} numbers", allowed=f"{dim} numbers a key")  # fmt: skip
    return keys.astype(np.int64), vectors.astype(np.float32).reshape(-1, dim)


def _replace(collection: EmbeddingCollection, slots: Sequence[Slot], keys: Any, vectors: Any, folder: Path) -> None:
    if slots[0].size is None:
        table = collection.dynamic_table(slots[0].group)
        table.clear()
        given, none = torch.from_numpy(keys), torch.zeros(len(keys), dtype=torch.int64)
        table.import_(DynamicContent(given, torch.from_numpy(vectors), none, none))
        return
    left = np.ones(len(keys), bool)
    for slot in slots:
        mine = (keys >= slot.offset) & (keys < slot.offset + (slot.size or 0))
        weight = collection.export_table(slot.column).weight
        weight[torch.from_numpy(keys[mine] - slot.offset + 1)] = torch.from_numpy(vectors[mine]).to(weight)
        collection.import_table(slot.column, TableState(weight))
        left &= ~mine
    if left.any():
        raise CheckpointError("a key lies in no slot", where=str(folder), value=int(keys[left][0]),
                              allowed=f"0 to {slots[-1].offset + (slots[-1].size or 0) - 1}",
                              fix="correct slot_size_array")  # fmt: skip
