"""HugeCTR's parameter files: dense weights in one file, a folder of keys and vectors for each embedding.

<prefix>_dense_<iter>.model             float32, layer after layer in the order of the graph
<prefix>_dense_<iter>.model.ntp.json    running statistics of BatchNorm, in the same order
<prefix><i>_sparse_<iter>.model/        key: int64; emb_vector: float32, one row per key;
                                        slot_id: uint64, if the embedding has slot_size_array or is localized
Before 3.1 a table was one file of rows: key of 4 or 8 bytes, slot_id if it is localized, vector; it can be read too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from viviane.compat.hugectr.columns import Columns, Slot
from viviane.compat.hugectr.json_files import load as load_json
from viviane.compat.hugectr.names import graph_name
from viviane.compat.hugectr.processes import is_first, write
from viviane.compat.hugectr.tables import (
    Keys,
    TableRows,
    collection_of,
    embeddings_of,
    read_rows,
    replace_rows,
    slots_of,
    with_offsets,
)
from viviane.core.errors import CheckpointError, ConfigError, suggest
from viviane.core.json_files import expected_form
from viviane.model import DenseLayer, Model, SparseEmbedding

_TRANSPOSED = ("InnerProduct", "FusedInnerProduct", "GroupFusedInnerProduct", "MLP")


def save(
    model: Model,
    columns: Columns,
    prefix: str,
    iteration: int,
    *,
    with_tables: bool = True,
    find_slots: Callable[[SparseEmbedding, Sequence[Slot], Keys], NDArray[np.int64] | None] | None = None,
) -> None:
    """Write all weights of a model.

    Args:
        find_slots: finds the slots of the keys of a table that several slots share; None if they are not written.

    Raises:
        ConfigError: the order of a layer's weights in HugeCTR's file is unknown.
    """
    dense = Path(f"{prefix}_dense_{iteration}.model")
    parts = [as_stored(kind, weight).detach().cpu().numpy().tobytes() for kind, weight in dense_weights(model)]
    write(dense, b"".join(parts))
    write(Path(f"{dense}.ntp.json"), json.dumps({"layers": _statistics(model)}).encode())
    for number, node in enumerate(sparse_embeddings(model, columns) if with_tables else ()):
        folder = Path(f"{prefix}{number}_sparse_{iteration}.model")
        slots = slots_of(node, columns)
        rows = read_rows(collection_of(model, node), slots)
        if rows.slots is None and find_slots is not None:
            rows = replace(rows, slots=find_slots(node, slots, rows.keys))
        write_folder(folder, rows)


def write_folder(folder: Path, rows: TableRows) -> None:
    """Write a table as a folder: key, emb_vector, and slot_id if slots are known."""
    write(folder / "key", rows.keys.astype("<i8").tobytes())
    write(folder / "emb_vector", rows.vectors.astype("<f4").tobytes())
    if rows.slots is not None:
        write(folder / "slot_id", rows.slots.astype("<u8").tobytes())
    elif is_first():
        (folder / "slot_id").unlink(missing_ok=True)  # of an earlier table, whose keys are gone


def load_dense(model: Model, file: str | Path, statistics: str | Path = "") -> None:
    """Load dense weights, and running statistics if there is a file of them.

    Raises:
        CheckpointError: the file is missing or belongs to another graph.
    """
    path = Path(file)
    if not path.is_file():
        raise CheckpointError("file of dense weights not found", where=str(path))
    values = torch.from_numpy(np.fromfile(path, "<f4").astype(np.float32))
    weights = list(dense_weights(model))
    wanted = sum(weight.numel() for _, weight in weights)
    if path.stat().st_size != 4 * wanted:
        raise CheckpointError("the number of weights in the file differs from the graph", where=str(path),
                              value=path.stat().st_size // 4, allowed=str(wanted))  # fmt: skip
    start = 0
    with torch.no_grad():
        for kind, weight in weights:
            stored = as_stored(kind, weight)
            part = values[start : start + weight.numel()].view(stored.shape)
            stored_back = part.T if kind in _TRANSPOSED and weight.dim() == 2 else part
            weight.copy_(stored_back)
            start += weight.numel()
    beside = Path(statistics or f"{path}.ntp.json")
    if beside.is_file():
        with expected_form(str(beside), CheckpointError):
            _load_statistics(model, load_json(beside)["layers"], beside)


def by_embedding(
    model: Model, columns: Columns, given: Sequence[str] | Mapping[str, str], where: str
) -> Iterator[tuple[SparseEmbedding, Path]]:
    """Yield each embedding with its file, in order or by name.

    Raises:
        ConfigError: the number of files is wrong, or a name is unknown.
    """
    nodes = {node.name: node for node in sparse_embeddings(model, columns)}
    if not isinstance(given, Mapping):
        names = [given] if isinstance(given, str) else list(given)
        if len(names) != len(nodes):
            raise ConfigError("there must be one file or folder per embedding", where=where, value=names,
                              allowed=f"{len(nodes)}: {', '.join(nodes)}")  # fmt: skip
        given = dict(zip(nodes, names, strict=True))
    for name, file in ((graph_name(name), file) for name, file in given.items()):
        if name not in nodes:
            raise ConfigError("unknown embedding", where=where, value=name, fix=suggest(name, nodes))
        yield nodes[name], Path(file)


def load_sparse(model: Model, columns: Columns, given: Sequence[str] | Mapping[str, str]) -> dict[str, Keys]:
    """Replace tables by the content of folders, one per embedding in order or by name; return their keys.

    Raises:
        ConfigError: the number of folders is wrong, or a name is unknown. CheckpointError: a folder is invalid.
    """
    orders = {}
    for node, folder in by_embedding(model, columns, given, "load_sparse_weights"):
        slots = slots_of(node, columns)
        rows = with_offsets(slots, _read_folder(folder, node.dim, slots, columns.key_bytes), str(folder))
        replace_rows(collection_of(model, node), slots, rows, str(folder))
        orders[node.name] = rows.keys
    return orders


def sparse_embeddings(model: Model, columns: Columns) -> list[SparseEmbedding]:
    """Return the nodes of hugectr.SparseEmbedding; embedding collections have their own files."""
    return [node for node in embeddings_of(model) if slots_of(node, columns)]


def _layers(model: Model) -> Iterator[tuple[str, torch.nn.Module]]:
    for node in model.nodes:
        if isinstance(node, DenseLayer) and node.name in model.module._modules:
            yield node.type, model.module._modules[node.name]  # type: ignore[misc]


def dense_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in HugeCTR's order."""
    for kind, layer in _layers(model):
        found = dict(layer.named_parameters())
        if kind == "GRU":
            raise ConfigError("GRU's weights are packed by cuDNN, in an order that is not supported", where=kind,
                              fix="save with viviane.Model.save")  # fmt: skip
        if kind == "MultiCross":  # layer by layer, each weight before its bias
            count = sum(name.startswith("biases.") for name in found)
            names = [f"{part}.{i}" for i in range(count) for part in ("weights", "projections", "biases")]
            found = {name: found[name] for name in names if name in found}
        yield from ((kind, weight) for weight in found.values())


def as_stored(kind: str, weight: Tensor) -> Tensor:
    """Return a weight in HugeCTR's layout: fully connected layers have (inputs, outputs)."""
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
        raise CheckpointError("wrong number of BatchNorm statistics", where=str(path), value=len(given),
                              allowed=str(len(norms)))  # fmt: skip
    for place, (norm, values) in enumerate(zip(norms, given, strict=True)):
        for kept, name in ((norm.running_mean, "mean"), (norm.running_var, "var")):
            kept.copy_(_statistic(values[name], len(kept), f"{path}, layers[{place}].{name}"))


def _statistic(values: Any, count: int, where: str) -> Tensor:
    """Return a list of finite numbers as a tensor.

    Raises:
        CheckpointError: it is none, or has another length; torch would repeat a single number.
    """
    numbers = isinstance(values, list) and all(type(one) in (int, float) and math.isfinite(one) for one in values)
    if not numbers or len(values) != count:
        given = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise CheckpointError("BatchNorm needs one finite number per column", where=where, value=given,
                              allowed=f"{count} numbers")  # fmt: skip
    return torch.tensor(values, dtype=torch.float32)


def read_numbers(file: Path, dtype: str) -> NDArray[Any]:
    """Return the numbers of a file.

    Raises:
        CheckpointError: it ends inside a number, which NumPy would leave out.
    """
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise CheckpointError("the file ends inside a number: it is truncated, or of another type", where=str(file),
                              value=f"{size} bytes", allowed=f"a multiple of {width} bytes")  # fmt: skip
    return np.fromfile(file, dtype)


def _read_folder(folder: Path, dim: int, slots: Sequence[Slot], key_bytes: int) -> TableRows:
    """Return the content of a folder, or of the single file that HugeCTR wrote before 3.1."""
    if folder.is_file():
        return _read_flat_file(folder, dim, slots, key_bytes)
    for name in ("key", "emb_vector"):
        if not (folder / name).is_file():
            raise CheckpointError("a file of the table is missing", where=str(folder / name))
    keys, vectors = read_numbers(folder / "key", "<i8"), read_numbers(folder / "emb_vector", "<f4")
    if vectors.size != keys.size * dim:
        raise CheckpointError("keys and vectors do not match", where=str(folder), value=f"{keys.size} keys, "
                              f"{vectors.size} values", allowed=f"{dim} values per key")  # fmt: skip
    beside = folder / "slot_id"
    owners = read_numbers(beside, "<u8").astype(np.int64) if beside.is_file() else None
    if owners is not None and len(owners) not in (0, len(keys)):
        raise CheckpointError("one slot per key needed", where=str(beside), value=len(owners), allowed=str(len(keys)))
    owners = None if owners is None or not len(owners) else owners
    return TableRows(keys.astype(np.int64), vectors.astype(np.float32).reshape(-1, dim), owners)


def _read_flat_file(file: Path, dim: int, slots: Sequence[Slot], key_bytes: int) -> TableRows:
    """Return rows of key | slot, if the embedding is localized | vector; the file size determines the layout."""
    size = file.stat().st_size
    vector = ("vector", "<f4", (dim,))
    forms = []
    for width in (key_bytes, 12 - key_bytes):
        key = ("key", "<u4" if width == 4 else "<i8")
        forms += [np.dtype([key, vector]), np.dtype([key, ("slot", "<u8"), vector])]
    for form in forms:
        if size % form.itemsize:
            continue
        rows = np.fromfile(file, form)
        if "slot" in (form.names or ()) and len(rows) and int(rows["slot"].max()) >= max(len(slots), 1):
            continue
        keys = rows["key"].astype(np.int64)
        owners = rows["slot"].astype(np.int64) if "slot" in (form.names or ()) else None
        pairs = keys if owners is None else np.stack([owners, keys], 1)
        if len(np.unique(pairs, axis=0)) == len(keys):
            return TableRows(keys, np.ascontiguousarray(rows["vector"], dtype=np.float32), owners)
    raise CheckpointError("the file is not a table of this width", where=str(file), value=f"{size} bytes",
                          allowed=f"rows of a key of {key_bytes} bytes, a slot or none, {dim} values")  # fmt: skip
