"""Writing a checkpoint: every process collects its content first, then all write, possibly in a thread.

A folder appears complete or not at all: it is written under a temporary name next to its target, flushed, and renamed.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from viviane.core.errors import CheckpointError
from viviane.core.exchange import sync_folder
from viviane.core.files import replace_folder, write_bytes_atomic
from viviane.embedding import TableStorage
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.optim import DenseOptimizer
from viviane.parallel import Group, ShardedCollection
from viviane.training.checkpoint.dense_state import dense_tensors, optimizer_tensors
from viviane.training.checkpoint.group_results import on_all_ranks, on_first_rank
from viviane.training.checkpoint.held_rows import CopyStream, held_rows
from viviane.training.checkpoint.increments import changed_sources
from viviane.training.checkpoint.manifest import (
    DENSE_FILE,
    HISTORY_FILE,
    OPTIMIZER_FILE,
    PROGRESS_FILE,
    BaseEntry,
    FileEntry,
    Manifest,
    TableEntry,
    TensorEntry,
    version_of,
    write_manifest,
)
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.checkpoint.table_files import table_file, table_files
from viviane.training.checkpoint.table_parts import TablePart, TieredRows, choose_writers, group_of
from viviane.training.checkpoint.tensor_files import Source, unchanged_tensors, write_sources

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
T = TypeVar("T")


@dataclass
class Content:
    """The content of a checkpoint that one process writes.

    Args:
        files: its files, and the tensors of each.
        tables: entries of the tables whose parts it writes.
        order: names of all tables of the module.
        dense: shapes of the parameters and buffers outside the tables, by name.
        values: the remaining fields of the manifest.
        history: text of the history file, or None.
        storages: storages that keep a snapshot of rows for this checkpoint until `close`.
    """

    values: dict[str, Any]
    dense: dict[str, TensorEntry]
    files: dict[str, dict[str, Source]] = field(default_factory=dict)
    tables: dict[str, TableEntry] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    history: str | None = None
    storages: list[TableStorage] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of this process's files."""
        every = [one for sources in self.files.values() for one in sources.values()]
        return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in every)

    def close(self) -> None:
        """Release the snapshots of the tables' rows."""
        for storage in self.storages:
            storage.end_snapshots()


def write_checkpoint(
    folder: str | Path,
    module: nn.Module,
    *,
    optimizer: DenseOptimizer | None = None,
    optimizer_state: bool = True,
    progress: Progress | None = None,
    group: Group | None = None,
) -> Manifest:
    """Write a checkpoint folder; an existing folder is replaced only when the new one is complete.

    Tables are written one after another directly from their memory. Each process writes the table parts that it holds;
    rank 0 writes the rest, and the manifest after all others have finished.

    Args:
        folder: the folder to create, on a disk that all processes share; the path of rank 0 is used.
        module: its parameters, buffers and embedding tables are saved.
        optimizer: the dense optimizer.
        optimizer_state: False saves weights only (dense and tables), for prediction.
        progress: the position of training.
        group: the processes that call it together; None: those that hold the module's tables.

    Raises:
        CheckpointError: the disk is full or not writable; names the folder and the bytes needed and free. If one
            process fails, all of them raise its message.
    """
    group = group or group_of(module)
    content = on_all_ranks(group, lambda: collect(module, optimizer, progress, group, optimizer_state=optimizer_state))
    return write_content(Path(folder), content, group)


# Collecting ---------------------------------------------------------------------------------------------------


def collect(
    module: nn.Module,
    optimizer: DenseOptimizer | None,
    progress: Progress | None,
    group: Group,
    *,
    optimizer_state: bool = True,
    hold: bool = False,
    base: BaseEntry | None = None,
) -> Content:
    """Collect everything that this process writes.

    Args:
        hold: keep the current content while training continues, until `Content.close`; False reads the live memory.
        base: the checkpoint since which storages follow changes: tables get only the rows that have changed.

    Raises:
        CheckpointError: the module has state that a checkpoint cannot store.
    """
    trained, place = optimizer if optimizer_state else None, progress or Progress()
    tensors, plain = ({}, {}) if trained is None else optimizer_tensors(trained, dense_parameters(module))
    dense = dense_tensors(module)
    values = {
        "viviane": version("viviane"),
        "torch": torch.__version__,
        "step": place.step,
        "epoch": place.epoch,
        "optimizer_state": optimizer_state,
        "dense_optimizer_values": plain,
        "progress": copy.deepcopy(place.values),
        "plans": _plans(module),
        "base": base,
    }
    content = Content(values, {name: TensorEntry.of(tensor) for name, tensor in dense.items()})
    stream = CopyStream(next((one.collection.device for one in table_files(module)), _device_of(dense)))
    keep: Callable[[Mapping[str, Tensor]], dict[str, Source]] = stream.hold if hold else unchanged_tensors
    try:
        _collect_tables(content, module, group, optimizer_state, hold, stream, base is not None)
        if group.rank == 0:
            content.files[DENSE_FILE] = keep(dense)
            if trained is not None:
                content.files[OPTIMIZER_FILE] = keep(tensors)
            if progress is not None:
                content.history = json.dumps(progress.history, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
                if progress.tensors:
                    content.files[PROGRESS_FILE] = keep(progress.tensors)
        stream.join()
    except BaseException:
        content.close()
        raise
    return content


def _collect_tables(
    content: Content, module: nn.Module, group: Group, optimizer_state: bool, hold: bool, stream: CopyStream,
    changed_only: bool,
) -> None:  # fmt: skip
    files = table_files(module)
    content.order = [file.full for file in files]
    writers = choose_writers({file.full: file.parts for file in files}, group.size)
    own = [(file, i) for file in files for i in range(len(file.parts)) if writers[file.full, i] == group.rank]
    changed = [_changed_rows(file.parts[i]) if changed_only else None for file, i in own]
    tensors = [  # this may update means of rows
        file.tensors(file.parts[i], optimizer_state, rows) for (file, i), rows in zip(own, changed, strict=True)
    ]
    if hold:
        for (file, i), rows in zip(own, changed, strict=True):
            storage = file.parts[i].storage
            if storage is not None and rows is None and storage not in content.storages and storage.take_snapshots():
                content.storages.append(storage)
    for (file, i), live, rows in zip(own, tensors, changed, strict=True):
        part = file.parts[i]
        assert part.storage is not None
        snapshot = part.storage.snapshot_of(part.table) if hold else None
        sources: dict[str, Source]
        if rows is not None:
            sources = changed_sources(part, live, rows)  # copies
        elif part.storage.in_tiers:
            sources = {name: TieredRows(part.storage, part.table, name) for name in live}
        elif snapshot is not None:
            sources = held_rows(*snapshot, live)
        else:
            sources = stream.hold(live) if hold else unchanged_tensors(live)
        content.files[table_file(file.full, i, len(file.parts))] = sources
        content.tables[file.full] = file.describe(part, optimizer_state, is_increment=rows is not None)


def _changed_rows(part: TablePart) -> Tensor | None:
    """Return the rows of a part that changed since its storage follows changes; None: the part is written whole."""
    return None if part.storage is None else part.storage.changed_rows(part.table)


def _plans(module: nn.Module) -> dict[str, Any]:
    every = collections_of(module).items()
    return {name: one.plan.to_dict() for name, one in every if isinstance(one, ShardedCollection)}


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((one.device for one in tensors.values()), torch.device("cpu"))


# Writing ------------------------------------------------------------------------------------------------------


def write_content(path: Path, content: Content, group: Group) -> Manifest:
    """Write the collected content; a collective call of all processes, with the errors of `write_checkpoint`."""

    def guarded(make: Callable[[], T]) -> T:
        try:
            return make()
        except OSError as error:
            raise _write_error(path, content, error) from error

    def write_own(work: Path) -> dict[str, Any]:
        entries = {name: write_sources(work / name, sources).to_dict() for name, sources in content.files.items()}
        if content.history is not None:
            entries[HISTORY_FILE] = _write_text(work / HISTORY_FILE, content.history).to_dict()
        return {"tables": {full: one.to_dict() for full, one in content.tables.items()}, "files": entries}

    with ExitStack() as stack:
        work = Path(on_first_rank(group, lambda: guarded(lambda: str(stack.enter_context(replace_folder(path))))))
        written = group.gather_data(on_all_ranks(group, lambda: guarded(lambda: write_own(work))))

        def finish() -> dict[str, Any]:
            manifest = _manifest(content, written)
            for name, entry in manifest.files.items():
                if (work / name).stat().st_size != entry.bytes:
                    raise OSError(errno.EIO, "a file was changed while the checkpoint was written", str(work / name))
            for inside in {(work / name).parent for name in manifest.files}:
                sync_folder(inside)
            write_manifest(work, manifest)
            stack.close()
            return manifest.to_dict()

        return Manifest.from_dict(on_first_rank(group, lambda: guarded(finish)))


def _write_text(file: Path, text: str) -> FileEntry:
    from hashlib import sha256

    data = text.encode()
    write_bytes_atomic(file, data)
    return FileEntry(bytes=len(data), sha256=sha256(data).hexdigest())


def _manifest(content: Content, written: list[dict[str, Any]]) -> Manifest:
    """Combine the entries of all processes."""
    tables: dict[str, TableEntry] = {}
    for one in written:
        for full, given in one["tables"].items():
            entry = TableEntry.from_dict(given)
            if full not in tables or entry.step > tables[full].step:
                tables[full] = entry
    found = {name: FileEntry.from_dict(entry) for one in written for name, entry in one["files"].items()}
    return Manifest(
        version=version_of(tables),
        dense=content.dense,
        tables={full: tables[full] for full in content.order},
        files={name: found[name] for name in sorted(found)},
        **content.values,
    )


def _write_error(path: Path, content: Content, cause: OSError) -> CheckpointError:
    code = cause.errno
    if code not in _FULL:
        return CheckpointError("the checkpoint could not be written", where=str(path), value=str(cause))
    reason = "the file exceeds the file system's size limit" if code == errno.EFBIG else "the disk is full"
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:
        free = 0
    return CheckpointError(
        f"the checkpoint could not be written: {reason} ({os.strerror(code)})",
        where=str(path),
        value=f"{content.num_bytes:,} bytes needed, {free:,} free",
        fix="free disk space or choose another run folder, then resume with resume=True; earlier ones are complete",
    )
