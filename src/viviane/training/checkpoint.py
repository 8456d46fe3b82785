"""Save and load a module, its optimizer state and its place in training as a folder of named tensors.

The format is logical: tables and parameters by name, in their true shape, whatever the machine held them in.
A folder appears whole or not at all: it is written beside its place under a temporary name, flushed, renamed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from viviane.config.base import load_json
from viviane.core.errors import CheckpointError
from viviane.core.files import file_sha256, replace_folder, sync_folder, write_json_atomic
from viviane.optim import DenseOptimizer
from viviane.training.dense_state import (
    dense_parameters,
    dense_tensors,
    optimizer_tensors,
    restore_optimizer,
)
from viviane.training.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    TensorEntry,
    verify_checkpoint,
    write_manifest,
)
from viviane.training.table_files import table_files
from viviane.training.tensor_files import read_tensors, write_tensors

DENSE_FILE: Final = "dense.safetensors"
OPTIMIZER_FILE: Final = "dense_optimizer.safetensors"
PROGRESS_FILE: Final = "progress.safetensors"
HISTORY_FILE: Final = "history.json"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_DIFFERENCES: Final = 20


@dataclass
class Progress:
    """Where training stood, besides the weights.

    Args:
        step, epoch: counts of finished steps and epochs.
        values: plain data: reader position, early stopping, chosen precision, ...
        tensors: states of the random generators and sums that JSON cannot hold to the bit.
        history: rows of metrics.
    """

    step: int = 0
    epoch: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def write_checkpoint(
    folder: str | Path,
    module: nn.Module,
    *,
    optimizer: DenseOptimizer | None = None,
    optimizer_state: bool = True,
    progress: Progress | None = None,
) -> Manifest:
    """Write a checkpoint folder; an older one of that name is replaced only when the new one is whole.

    Tables go to their files one after another, straight from their own memory.

    Args:
        folder: the folder to make.
        module: its parameters, buffers and embedding tables are saved.
        optimizer: the dense optimizer.
        optimizer_state: False saves weights only (dense and tables), for prediction.
        progress: the place in training.

    Raises:
        CheckpointError: the disk is full or not writable; names the folder and the bytes needed and free.
    """
    path = Path(folder)
    try:
        with replace_folder(path) as work:
            return _write_parts(work, module, optimizer if optimizer_state else None, optimizer_state, progress)
    except OSError as error:
        raise _write_error(path, module, optimizer, error.errno, error) from error
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors' own error carries the number as text
        if isinstance(error, CheckpointError) or code is None:
            raise
        raise _write_error(path, module, optimizer, int(code[1]), error) from error


def load_checkpoint(
    folder: str | Path,
    module: nn.Module,
    *,
    optimizer: DenseOptimizer | None = None,
    weights_only: bool = False,
) -> Progress:
    """Verify a checkpoint, then copy it into a module of the same shape and its dense optimizer.

    Nothing is changed before every file was verified and every name and shape compared.

    Args:
        folder: the checkpoint.
        module: takes parameters, buffers and embedding tables.
        optimizer: the dense optimizer; None where the module has no dense parameters.
        weights_only: leave the dense optimizer alone and start the tables' optimizers anew.

    Raises:
        CheckpointError: a file is missing, truncated or altered, or the checkpoint is of another model.
    """
    path = Path(folder)
    manifest = verify_checkpoint(path)
    _compare(path, manifest, module)
    if not weights_only and not manifest.optimizer_state:
        raise CheckpointError(
            "the checkpoint holds weights only, training cannot go on from it",
            where=str(path),
            fix="load it with weights_only=True, or resume from a checkpoint of a run folder",
        )
    files = [(table, manifest.tables[table.full]) for table in table_files(module)]
    tables = [(table, entry, table.read(path, entry, weights_only)) for table, entry in files]
    if optimizer is not None and not weights_only:
        restore_optimizer(
            optimizer,
            dense_parameters(module),
            read_tensors(path / OPTIMIZER_FILE),
            manifest.dense_optimizer_values,
            str(path / OPTIMIZER_FILE),
        )
    saved = read_tensors(path / DENSE_FILE)
    with torch.no_grad():
        for name, tensor in dense_tensors(module).items():
            tensor.copy_(saved[name])
    for table, entry, content in tables:
        table.restore(entry, content, weights_only)
    tensors = read_tensors(path / PROGRESS_FILE) if PROGRESS_FILE in manifest.files else {}
    history = load_json(path / HISTORY_FILE) if HISTORY_FILE in manifest.files else []
    return Progress(manifest.step, manifest.epoch, dict(manifest.progress), tensors, history)


def _write_parts(
    work: Path,
    module: nn.Module,
    optimizer: DenseOptimizer | None,
    optimizer_state: bool,
    progress: Progress | None,
) -> Manifest:
    place = progress or Progress()
    dense = dense_tensors(module)
    write_tensors(work / DENSE_FILE, dense)
    values: dict[str, Any] = {}
    if optimizer is not None:
        tensors, values = optimizer_tensors(optimizer, dense_parameters(module))
        write_tensors(work / OPTIMIZER_FILE, tensors)
    tables = {table.full: table.write(work, optimizer_state) for table in table_files(module)}
    if place.tensors:
        write_tensors(work / PROGRESS_FILE, place.tensors)
    if progress is not None:
        write_json_atomic(work / HISTORY_FILE, place.history)
    manifest = Manifest(
        viviane=version("viviane"),
        torch=torch.__version__,
        step=place.step,
        epoch=place.epoch,
        dense={name: TensorEntry.of(tensor) for name, tensor in dense.items()},
        optimizer_state=optimizer_state,
        dense_optimizer_values=values,
        tables=tables,
        progress=place.values,
        files=_entries(work),
    )
    write_manifest(work, manifest)
    return manifest


def _entries(work: Path) -> dict[str, FileEntry]:
    """Flush every file and folder, and describe the files."""
    entries = {}
    for file in sorted(work.rglob("*")):
        if file.is_dir():
            sync_folder(file)
        elif file.name != MANIFEST_FILE:
            entry = FileEntry(bytes=file.stat().st_size, sha256=file_sha256(file))
            entries[file.relative_to(work).as_posix()] = entry
    return entries


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
            f"the checkpoint is of another model:{listed}",
            where=str(path),
            fix="build the model with the settings it was saved with",
        )


def _write_error(
    path: Path, module: nn.Module, optimizer: DenseOptimizer | None, code: int | None, cause: Exception
) -> CheckpointError:
    if code not in _FULL:
        return CheckpointError("the checkpoint could not be written", where=str(path), value=str(cause))
    reason = "a file may not grow that large" if code == errno.EFBIG else "the disk is full"
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        free = 0
    return CheckpointError(
        f"the checkpoint could not be written: {reason} ({os.strerror(code or 0)})",
        where=str(path),
        value=f"{_bytes_needed(module, optimizer):,} bytes needed, {free:,} free",
        fix="make room or choose another run folder, then resume=True; earlier checkpoints are whole",
    )


def _bytes_needed(module: nn.Module, optimizer: DenseOptimizer | None) -> int:
    """Add up what a checkpoint would take."""
    tensors = list(dense_tensors(module).values())
    if optimizer is not None:
        tensors += optimizer_tensors(optimizer, dense_parameters(module))[0].values()
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for table in table_files(module):
        total += sum(one.numel() * one.element_size() for one in table.tensors(True).values())
    return total
