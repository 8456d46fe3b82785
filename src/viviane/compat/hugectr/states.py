"""HugeCTR's files of optimizer state.

<prefix>_opt_dense_<iter>.model         float32: one complete state (Adam: m), then the next (v), in the order of
                                        the dense weights; empty for SGD
<prefix><i>_opt_sparse_<iter>.model     float32: for each state the complete buffer of the table, whose first rows are
                                        those of the table's file `key`; the buffer has as many rows as
                                        fit in workspace_size_per_gpu_in_mb, or as slot_size_array has
HugeCTR writes float16 with use_mixed_precision; the file size determines the type, and both can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from viviane.compat.hugectr.columns import Columns
from viviane.compat.hugectr.files import as_stored, by_embedding, dense_weights, sparse_embeddings
from viviane.compat.hugectr.inputs import SparseEmbedding
from viviane.compat.hugectr.processes import is_first, write
from viviane.compat.hugectr.tables import Keys, TableRows, collection_of, merge_rows, read_rows, slots_of
from viviane.core.errors import CheckpointError
from viviane.model import Model

_ORDER: Final = ("m", "v", "accumulator", "momentum", "n", "z")
"""States in HugeCTR's order; without the step counts of LazyGlobal, which restart."""


def save_states(model: Model, columns: Columns, prefix: str, iteration: int, given: Sequence[SparseEmbedding]) -> None:
    """Write the optimizer state of dense weights and of tables."""
    optimizer = model.trainer.stepper.optimizer
    parts: list[bytes] = []
    for name in () if optimizer is None else optimizer.state_names:
        for kind, weight in dense_weights(model):
            state = optimizer.state[weight].get(name) if optimizer is not None and weight in optimizer.state else None
            values = torch.zeros_like(weight) if state is None else state
            parts.append(as_stored(kind, values).detach().cpu().numpy().astype("<f4").tobytes())
    write(Path(f"{prefix}_opt_dense_{iteration}.model"), b"".join(parts))
    for number, (node, one) in enumerate(zip(sparse_embeddings(model, columns), given, strict=False)):
        rows = read_rows(collection_of(model, node), slots_of(node, columns))
        states = [rows.states[name] for name in _ORDER if name in rows.states]
        _write_buffers(Path(f"{prefix}{number}_opt_sparse_{iteration}.model"), states, _capacity(one, states))


def _capacity(given: SparseEmbedding, states: Sequence[Any]) -> int:
    """Return the rows of HugeCTR's buffer on one GPU: MB 2^20 / ((1 + states) 4 D)."""
    row = 4 * given.embedding_vec_size * (1 + len(states))
    return int(given.workspace_size_per_gpu_in_mb * 2**20 // row)


def _write_buffers(file: Path, states: Sequence[Any], capacity: int) -> None:
    if not is_first():
        return
    with file.open("wb") as out:
        for number, values in enumerate(states):
            size = 4 * values.shape[1] * max(capacity, len(values))
            out.seek(number * size)  # the gap takes no disk space
            out.write(values.astype("<f4").tobytes())
            out.truncate((number + 1) * size)


def load_dense_states(model: Model, file: str | Path) -> None:
    """Load the optimizer state of dense weights.

    Raises:
        CheckpointError: the file is missing, or belongs to another optimizer or graph.
    """
    path = _there(file)
    optimizer = model.trainer.stepper.optimizer
    names = () if optimizer is None else optimizer.state_names
    weights = list(dense_weights(model))
    count = sum(weight.numel() for _, weight in weights)
    size = path.stat().st_size
    if size not in (2 * count * len(names), 4 * count * len(names)):
        allowed = f"{len(names)} x {count} values of 4 or 2 bytes"
        raise CheckpointError(
            "the file has a wrong number of states", where=str(path), value=f"{size} bytes", allowed=allowed
        )
    kind_of_numbers = "<f4" if size == 4 * count * len(names) else "<f2"
    values = torch.from_numpy(np.fromfile(path, kind_of_numbers).astype(np.float32))
    start = 0
    for name in names:
        for kind, weight in weights:
            shape = as_stored(kind, weight).shape
            part = values[start : start + weight.numel()].view(shape)
            assert optimizer is not None
            turned = as_stored(kind, part)  # a transposition is its own inverse
            optimizer.state[weight][name] = turned.to(weight).clone(memory_format=torch.contiguous_format)
            start += weight.numel()


def load_sparse_states(
    model: Model,
    columns: Columns,
    given: Sequence[str] | Mapping[str, str],
    orders: Mapping[str, Keys],
    embeddings: Sequence[SparseEmbedding],
) -> None:
    """Load the optimizer state of tables, after their weights.

    Args:
        given: one file per embedding, in order or by name.
        orders: keys of each embedding in the order of its file `key`; without it, the order of the table.
        embeddings: the script's embeddings; their buffer sizes identify a file of float16.

    Raises:
        CheckpointError: a file is missing, or belongs to another optimizer or size.
    """
    for node, file in by_embedding(model, columns, given, "load_sparse_optimizer_states"):
        path = _there(file)
        collection, slots = collection_of(model, node), slots_of(node, columns)
        now = read_rows(collection, slots)
        names = [name for name in _ORDER if name in now.states]
        keys = orders.get(node.name, now.keys)
        own = next(one for one in embeddings if one.sparse_embedding_name == node.name)
        half = 2 * node.dim * len(names) * max(_capacity(own, names), sum(own.slot_size_array))
        width = 2 if half and path.stat().st_size == half else 4
        rows, rest = divmod(path.stat().st_size, width * node.dim * max(len(names), 1))
        if rest or (rows < len(keys) if names else rows > 0):
            raise CheckpointError("the file has a wrong number of states", where=str(path),
                                  value=path.stat().st_size // width,
                                  allowed=f"{len(names)} x at least {len(keys)} rows of {node.dim}")  # fmt: skip
        if not names or not len(keys):
            continue
        stored = np.memmap(path, f"<f{width}", "r", shape=(len(names), rows, node.dim))
        states = {name: np.array(stored[i, : len(keys)], np.float32) for i, name in enumerate(names)}
        place = {int(key): i for i, key in enumerate(now.keys)}
        there = np.array([int(key) in place for key in keys], bool)  # the others are in no slot and were skipped
        keys, states = keys[there], {name: values[there] for name, values in states.items()}
        order = np.array([place[int(key)] for key in keys], np.int64)
        merge_rows(collection, slots, TableRows(keys, now.vectors[order], None, states), str(path))


def _there(file: str | Path) -> Path:
    path = Path(file)
    if not path.is_file():
        raise CheckpointError("file of optimizer state not found", where=str(path))
    return path
