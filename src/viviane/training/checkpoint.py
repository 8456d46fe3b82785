"""Save and load a module, its optimizer state and its place in training as a folder of named tensors.

The format is logical: tables and parameters by name, in their true shape, whatever the machine held them in.
A folder appears whole or not at all: it is written beside its place under a temporary name, flushed, renamed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from viviane.config.base import load_json
from viviane.core.errors import CheckpointError
from viviane.core.files import file_sha256, replace_folder, sync_folder, write_json_atomic
from viviane.optim import DenseOptimizer
from viviane.parallel import Group
from viviane.training.dense_state import (
    dense_parameters,
    dense_tensors,
    optimizer_tensors,
    restore_optimizer,
)
from viviane.training.group_results import on_first, together
from viviane.training.manifest import (
    FileEntry,
    Manifest,
    TableEntry,
    TensorEntry,
    read_manifest,
    verify_files,
    version_of,
    write_manifest,
)
from viviane.training.saved_table import SavedTable
from viviane.training.table_files import TableFile, table_file, table_files
from viviane.training.table_parts import choose_writers, group_of
from viviane.training.tensor_files import read_tensors, write_tensors

DENSE_FILE: Final = "dense.safetensors"
OPTIMIZER_FILE: Final = "dense_optimizer.safetensors"
PROGRESS_FILE: Final = "progress.safetensors"
HISTORY_FILE: Final = "history.json"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAX_DIFFERENCES: Final = 20
T = TypeVar("T")


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
    group: Group | None = None,
) -> Manifest:
    """Write a checkpoint folder; an older one of that name is replaced only when the new one is whole.

    Tables go to their files one after another, straight from their own memory. Of several processes each writes
    what it has of the tables; rank 0 writes the rest, and the manifest when all others have finished.

    Args:
        folder: the folder to make, on a disk that all processes see; that of rank 0 counts.
        module: its parameters, buffers and embedding tables are saved.
        optimizer: the dense optimizer.
        optimizer_state: False saves weights only (dense and tables), for prediction.
        progress: the place in training.
        group: the processes that call it together; None takes those that have the module's tables.

    Raises:
        CheckpointError: the disk is full or not writable; names the folder and the bytes needed and free. Where one
            process fails, all of them raise its message.
    """
    path, group = Path(folder), group or group_of(module)
    place, trained = progress or Progress(), optimizer if optimizer_state else None
    files = table_files(module)
    writers = choose_writers({file.full: file.parts for file in files}, group.size)

    def guarded(make: Callable[[], T]) -> T:
        return _in_words(path, module, optimizer, make)

    def write_own(work: Path) -> dict[str, Any]:
        own = _write_tables(work, files, writers, group.rank, optimizer_state)
        if group.rank == 0:
            own["files"] |= _flushed(work, _write_dense(work, module, trained, progress))
        return own

    with ExitStack() as stack:
        work = Path(on_first(group, lambda: guarded(lambda: str(stack.enter_context(replace_folder(path))))))
        written = group.gather_data(together(group, lambda: guarded(lambda: write_own(work))))

        def finish() -> dict[str, Any]:
            manifest = _manifest(module, trained, optimizer_state, place, files, written)
            for inside in {(work / name).parent for name in manifest.files}:
                sync_folder(inside)
            write_manifest(work, manifest)
            stack.close()
            return manifest.to_dict()

        return Manifest.from_dict(on_first(group, lambda: guarded(finish)))


def take_part(module: nn.Module, *, optimizer_state: bool = True) -> None:
    """Do this process's part where rank 0 alone calls `write_checkpoint`, on a module with tables of several."""
    if group_of(module).size > 1:
        write_checkpoint("checkpoint of rank 0", module, optimizer_state=optimizer_state)


def load_checkpoint(
    folder: str | Path,
    module: nn.Module,
    *,
    optimizer: DenseOptimizer | None = None,
    weights_only: bool = False,
    group: Group | None = None,
) -> Progress:
    """Verify a checkpoint, then copy it into a module of the same shape and its dense optimizer.

    Nothing is changed before every file was verified and every name and shape compared. The checkpoint may be of
    another number of processes, or another plan: each process reads what it needs, and verifies its share of files.

    Args:
        folder: the checkpoint.
        module: takes parameters, buffers and embedding tables.
        optimizer: the dense optimizer; None where the module has no dense parameters.
        weights_only: leave the dense optimizer alone and start the tables' optimizers anew.
        group: the processes that call it together; None takes those that have the module's tables.

    Raises:
        CheckpointError: a file is missing, truncated or altered, or the checkpoint is of another model.
    """
    path, group = Path(folder), group or group_of(module)
    manifest, tables = together(group, lambda: _verified(path, module, weights_only, group))
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
    for table, content in tables:
        table.restore(content, weights_only)
    tensors = read_tensors(path / PROGRESS_FILE) if PROGRESS_FILE in manifest.files else {}
    history = load_json(path / HISTORY_FILE) if HISTORY_FILE in manifest.files else []
    return Progress(manifest.step, manifest.epoch, dict(manifest.progress), tensors, history)


def _verified(
    path: Path, module: nn.Module, weights_only: bool, group: Group
) -> tuple[Manifest, list[tuple[TableFile, SavedTable]]]:
    """Verify this process's share of the files, and map the tables that it needs."""
    manifest = read_manifest(path)
    by_size = sorted(manifest.files, key=lambda name: (manifest.files[name].bytes, name))
    verify_files(path, manifest, by_size[group.rank :: group.size])
    _compare(path, manifest, module)
    if not weights_only and not manifest.optimizer_state:
        raise CheckpointError(
            "the checkpoint holds weights only, training cannot go on from it",
            where=str(path),
            fix="load it with weights_only=True, or resume from a checkpoint of a run folder",
        )
    return manifest, [
        (table, table.read(path, manifest.tables[table.full], weights_only)) for table in table_files(module)
    ]


def _in_words(path: Path, module: nn.Module, optimizer: DenseOptimizer | None, make: Callable[[], T]) -> T:
    """Call a function, and put an error of the disk into words on the process that had it."""
    try:
        return make()
    except OSError as error:
        raise _write_error(path, module, optimizer, error.errno, error) from error
    except Exception as error:
        code = re.search(r"\(os error (\d+)\)", str(error))  # safetensors' own error carries the number as text
        if isinstance(error, CheckpointError) or code is None:
            raise
        raise _write_error(path, module, optimizer, int(code[1]), error) from error


def _write_tables(
    work: Path,
    files: list[TableFile],
    writers: Mapping[tuple[str, int], int],
    rank: int,
    optimizer_state: bool,
) -> dict[str, Any]:
    """Write what a process has of the tables; returns entries of tables and of files, plain data."""
    tables, names = {}, []
    for file in files:
        count = len(file.parts)
        own = [i for i in range(count) if writers[file.full, i] == rank]
        entry = file.write(work, own, optimizer_state)
        if entry is not None:
            tables[file.full] = entry.to_dict()
            names += [table_file(file.full, i, count) for i in own]
    return {"tables": tables, "files": _flushed(work, names)}


def _write_dense(
    work: Path, module: nn.Module, optimizer: DenseOptimizer | None, progress: Progress | None
) -> set[str]:
    """Write all but tables and manifest; returns the names of the files."""
    write_tensors(work / DENSE_FILE, dense_tensors(module))
    written = {DENSE_FILE}
    if optimizer is not None:
        write_tensors(work / OPTIMIZER_FILE, optimizer_tensors(optimizer, dense_parameters(module))[0])
        written.add(OPTIMIZER_FILE)
    if progress is not None:
        write_json_atomic(work / HISTORY_FILE, progress.history)
        written.add(HISTORY_FILE)
        if progress.tensors:
            write_tensors(work / PROGRESS_FILE, progress.tensors)
            written.add(PROGRESS_FILE)
    return written


def _flushed(work: Path, names: Iterable[str]) -> dict[str, Any]:
    """Flush files to the disk, and describe them: entries by name, plain data."""
    found = {}
    for name in names:
        file = work / name
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
        found[name] = FileEntry(bytes=file.stat().st_size, sha256=file_sha256(file)).to_dict()
    return found


def _manifest(
    module: nn.Module,
    optimizer: DenseOptimizer | None,
    optimizer_state: bool,
    place: Progress,
    files: list[TableFile],
    written: list[dict[str, Any]],
) -> Manifest:
    """Put together what the processes have written."""
    entries = {
        file.full: [TableEntry.from_dict(one["tables"][file.full]) for one in written if file.full in one["tables"]]
        for file in files
    }
    tables = {full: max(several, key=lambda one: one.step) for full, several in entries.items()}
    found = {name: FileEntry.from_dict(entry) for one in written for name, entry in one["files"].items()}
    return Manifest(
        version=version_of(tables),
        viviane=version("viviane"),
        torch=torch.__version__,
        step=place.step,
        epoch=place.epoch,
        dense={name: TensorEntry.of(tensor) for name, tensor in dense_tensors(module).items()},
        optimizer_state=optimizer_state,
        dense_optimizer_values={} if optimizer is None else optimizer_tensors(optimizer, dense_parameters(module))[1],
        tables=tables,
        progress=place.values,
        files={name: found[name] for name in sorted(found)},
    )


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
    """Add up what a checkpoint would take, of several processes this one's share."""
    tensors = list(dense_tensors(module).values())
    if optimizer is not None:
        tensors += optimizer_tensors(optimizer, dense_parameters(module))[0].values()
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for table in table_files(module):
        held = [table.tensors(part, True) for part in table.parts if part.storage is not None]
        total += sum(one.numel() * one.element_size() for tensors in held for one in tensors.values())
    return total
