"""Loading a checkpoint into a module, its optimizer and the state of training.

The format is logical: tables and parameters by name, in their full shape, independent of storage and device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.core.json_files import read_json
from viviane.core.locations import AnyPath
from viviane.core.remote.cache import local_copy
from viviane.embedding.module_parts import dense_parameters
from viviane.optim import DenseOptimizer
from viviane.parallel import Group
from viviane.training.checkpoint.dense_state import dense_tensors, restore_optimizer
from viviane.training.checkpoint.group_results import on_all_ranks
from viviane.training.checkpoint.increments import needed_files, open_table
from viviane.training.checkpoint.manifest import (
    DENSE_FILE,
    HISTORY_FILE,
    OPTIMIZER_FILE,
    PROGRESS_FILE,
    Manifest,
    TensorEntry,
    read_manifest,
    verify_files,
)
from viviane.training.checkpoint.saved_table import Progress, SavedTable
from viviane.training.checkpoint.table_files import TableFile, table_files
from viviane.training.checkpoint.table_parts import group_of
from viviane.training.checkpoint.tensor_files import read_tensors

_MAX_DIFFERENCES: Final = 20


def load_checkpoint(
    folder: str | AnyPath,
    module: nn.Module,
    *,
    optimizer: DenseOptimizer | None = None,
    weights_only: bool = False,
    group: Group | None = None,
) -> Progress:
    """Verify a checkpoint, then copy it into a module with the same parameters and its dense optimizer.

    Nothing is changed until every file is verified and every name and shape compared. The checkpoint may have been
    written by another number of processes, or under another plan: each process reads the parts that it needs, and
    verifies its share of the files.

    Args:
        folder: the checkpoint.
        module: its parameters, buffers and embedding tables are overwritten.
        optimizer: the dense optimizer; None if the module has no dense parameters.
        weights_only: do not change the dense optimizer, and reset the state of the tables' optimizers.
        group: the processes that call it together; None: the processes that hold the module's tables.

    Raises:
        CheckpointError: a file is missing, truncated or altered, or the checkpoint belongs to another model.
    """
    path, group = local_copy(folder), group or group_of(module)
    manifest, tables = on_all_ranks(group, lambda: _verified(path, module, weights_only, group))
    saved = _dense(path, manifest)
    if optimizer is not None and not weights_only:
        if OPTIMIZER_FILE not in manifest.files:
            raise CheckpointError(
                "the checkpoint has no state of the dense optimizer", where=str(path / OPTIMIZER_FILE),
                fix="load it with weights_only=True",
            )  # fmt: skip
        restore_optimizer(
            optimizer,
            dense_parameters(module),
            read_tensors(path / OPTIMIZER_FILE),
            manifest.dense_optimizer_values,
            str(path / OPTIMIZER_FILE),
        )
    with torch.no_grad():
        for name, tensor in dense_tensors(module).items():
            tensor.copy_(saved[name])
    for table, content in tables:
        table.restore(content, weights_only)
    tensors = read_tensors(path / PROGRESS_FILE) if PROGRESS_FILE in manifest.files else {}
    history = _history(path / HISTORY_FILE) if HISTORY_FILE in manifest.files else []
    saved_tables = {table.full: content for table, content in tables}
    return Progress(manifest.step, manifest.epoch, dict(manifest.progress), tensors, history, saved_tables)


@dataclass(frozen=True)
class SavedSizes:
    """How large the tables and dense weights in the files of a checkpoint are: a model that loads it is not larger.

    Args:
        where: the checkpoint.
        tables: rows and columns of the tables with a fixed number of rows, by "<collection>.<table>".
        dense_bytes: of the file of all dense weights.
    """

    where: str
    tables: Mapping[str, tuple[int, ...]]
    dense_bytes: int

    def check_table(self, full: str, num_rows: int, dim: int) -> None:
        """Refuse a table of another size before it takes memory.

        Raises:
            CheckpointError: the checkpoint lacks the table, or it has another size there.
        """
        found = self.tables.get(full)
        if found != (num_rows, dim):
            raise CheckpointError(
                "a table of the model has another size in its weights", where=f"{self.where}, table {full!r}",
                value="absent" if found is None else f"{found[0]} x {found[1]}", allowed=f"{num_rows} x {dim}",
                fix="use another copy of the model",
            )  # fmt: skip


def saved_sizes(folder: Path) -> SavedSizes:
    """Read the shapes of a checkpoint's tables from their files, without their rows.

    Raises:
        CheckpointError: a file is missing, or its tensors differ from the manifest; the dense weights were altered.
    """
    manifest = read_manifest(folder)
    fixed = {full: entry.weight.shape for full, entry in manifest.tables.items() if not entry.is_dynamic}
    for full in fixed:
        open_table(folder, manifest, full).check_files()
    verify_files(folder, manifest, [DENSE_FILE])
    return SavedSizes(str(folder), fixed, manifest.files[DENSE_FILE].bytes)


def load_dense_weights(path: Path, module: nn.Module, manifest: Manifest) -> None:
    """Verify only the file of the dense weights, and copy it into a module whose tables are loaded separately.

    Args:
        path: the checkpoint, a local folder.
        module: its parameters and buffers are overwritten.
        manifest: manifest of the checkpoint.

    Raises:
        CheckpointError: the file is missing, truncated or altered, or belongs to another model.
    """
    verify_files(path, manifest, [DENSE_FILE])
    copy_dense(_dense(path, manifest), module, str(path / DENSE_FILE))


def copy_dense(saved: Mapping[str, Tensor], module: nn.Module, where: str) -> None:
    """Copy named tensors into a module's parameters and buffers, if all of them match.

    Raises:
        CheckpointError: names, shapes or types differ; nothing is changed.
    """
    own = dense_tensors(module)
    kinds = {name: str(TensorEntry.of(tensor)) for name, tensor in own.items()}
    found = {name: str(TensorEntry.of(tensor)) for name, tensor in saved.items()}
    wrong = sorted(name for name in kinds.keys() | found.keys() if kinds.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError("the dense weights belong to another model", where=f"{where}, {name}",
                              value=found.get(name, "absent"), allowed=kinds.get(name, "absent"))  # fmt: skip
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def _history(file: Path) -> list[dict[str, Any]]:
    rows = read_json(file, error=CheckpointError)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CheckpointError("the history of a checkpoint must be a list of rows", where=str(file))
    return rows


def _verified(
    path: Path, module: nn.Module, weights_only: bool, group: Group
) -> tuple[Manifest, list[tuple[TableFile, SavedTable]]]:
    """Verify this process's share of the files, and map the tables that it needs."""
    manifest = read_manifest(path)
    by_size = sorted(needed_files(path, manifest), key=lambda one: (one[1].files[one[2]].bytes, str(one[0]), one[2]))
    for place, content, name in by_size[group.rank :: group.size]:
        verify_files(place, content, [name])
    _compare(path, manifest, module)
    if not weights_only and not manifest.optimizer_state:
        raise CheckpointError(
            "the checkpoint holds weights only, so training cannot be resumed from it",
            where=str(path),
            fix="load it with weights_only=True, or resume from a checkpoint of a run folder",
        )
    return manifest, [(table, table.read(path, manifest, weights_only)) for table in table_files(module)]


def _dense(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the dense weights, and compare their names, shapes and types with the manifest's."""
    found = read_tensors(path / DENSE_FILE)
    kinds = {name: str(TensorEntry.of(tensor)) for name, tensor in found.items()}
    listed = {name: str(entry) for name, entry in manifest.dense.items()}
    wrong = sorted(name for name in kinds.keys() | listed.keys() if kinds.get(name) != listed.get(name))
    if wrong:
        raise CheckpointError(
            "the dense weights differ from the manifest", where=f"{path / DENSE_FILE}, {wrong[0]!r}",
            value=kinds.get(wrong[0], "absent"), allowed=listed.get(wrong[0], "absent"), fix="use another checkpoint",
        )  # fmt: skip
    return found


def _compare(path: Path, manifest: Manifest, module: nn.Module) -> None:
    """Refuse a checkpoint whose names or shapes are not the module's."""
    mine = {name: str(TensorEntry.of(tensor)) for name, tensor in dense_tensors(module).items()}
    theirs = {name: str(entry) for name, entry in manifest.dense.items()}
    mine |= {f"table {table.full}": table.signature for table in table_files(module)}
    theirs |= {f"table {full}": entry.signature for full, entry in manifest.tables.items()}
    lines = [f"{name}: only in the checkpoint, {theirs[name]}" for name in sorted(theirs.keys() - mine.keys())]
    lines += [f"{name}: only in the model, {mine[name]}" for name in sorted(mine.keys() - theirs.keys())]
    both = sorted(mine.keys() & theirs.keys())
    lines += [f"{n}: {theirs[n]} in the checkpoint, {mine[n]} in the model" for n in both if mine[n] != theirs[n]]
    if lines:
        more = [f"and {len(lines) - _MAX_DIFFERENCES} more"] if len(lines) > _MAX_DIFFERENCES else []
        listed = "".join(f"\n    {line}" for line in [*lines[:_MAX_DIFFERENCES], *more])
        raise CheckpointError(
            f"the checkpoint belongs to another model:{listed}",
            where=str(path),
            fix="build the model with the settings it was saved with",
        )
