"""Operations on a checkpoint without its model: reshard its tables, compare two checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from viviane.core.errors import ConfigError
from viviane.core.exchange import tidy
from viviane.core.files import file_sha256, replace_folder
from viviane.embedding import TableConfig
from viviane.parallel import ShardingPlan, TablePlan, shards_of
from viviane.training.checkpoint.increments import open_table, verify_checkpoint
from viviane.training.checkpoint.manifest import (
    DENSE_FILE,
    MAX_SHARDS,
    OPTIMIZER_FILE,
    PROGRESS_FILE,
    FileEntry,
    Manifest,
    ShardEntry,
    TableEntry,
    version_of,
    write_manifest,
)
from viviane.training.checkpoint.saved_table import SavedTable
from viviane.training.checkpoint.table_files import table_file
from viviane.training.checkpoint.tensor_files import read_tensors, write_tensors

_Cut: TypeAlias = "list[tuple[range, int, int]]"
"""Keys and columns of each file of a table."""
_PIECE_ELEMENTS = 1 << 22
_OF_ALL_COLUMNS = ("state.last_step",)  # one element per row, equal in all column shards
_DENSE_FILES = (DENSE_FILE, OPTIMIZER_FILE, PROGRESS_FILE)


def reshard(
    source: str | Path, target: str | Path, *, processes: int | None = None, plan: ShardingPlan | None = None
) -> None:
    """Rewrite a checkpoint with another sharding of its tables; content, step and position stay the same bit for bit.

    Args:
        source: the checkpoint; it is verified first.
        target: the new folder.
        processes: split every table by rows into this many files; 1 gives one file per table.
        plan: split the tables as this plan does, instead of `processes`.

    Raises:
        ConfigError: the plan does not contain a table or does not match it; the target exists.
        CheckpointError: the source is damaged, or the disk is full.
    """
    if (processes is None) == (plan is None):
        raise ConfigError("give either a number of processes or a plan", value=processes)
    if processes is not None and not 1 <= processes <= MAX_SHARDS:
        raise ConfigError("invalid number of processes", value=processes, allowed=f"1 to {MAX_SHARDS}")
    _rewrite(source, target, lambda full, entry: _shards(full, entry, processes, plan))


def _rewrite(source: str | Path, target: str | Path, cut: Callable[[str, TableEntry], _Cut]) -> None:
    """Write a checkpoint with whole tables in other files."""
    folder = new_folder(target)
    manifest = verify_checkpoint(source)
    with replace_folder(folder, overwrite=False) as work:
        old = {name for entry in manifest.tables.values() for name in entry.files}
        for name in manifest.files.keys() - old:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(source) / name, work / name)
        tables = {}
        for full, entry in manifest.tables.items():
            tables[full] = _cut(open_table(source, manifest, full), work, full, cut(full, entry))
        names = sorted({*(manifest.files.keys() - old), *(name for entry in tables.values() for name in entry.files)})
        files = {n: FileEntry(bytes=(work / n).stat().st_size, sha256=file_sha256(work / n)) for n in names}
        changes = {"tables": tables, "files": files, "version": version_of(tables), "base": None}
        write_manifest(work, Manifest(**{**dict(manifest), **changes}))


def compact(source: str | Path, target: str | Path) -> None:
    """Write an incremental checkpoint with whole tables, in the files of its own cut; its bases are not needed then.

    Args:
        source: the checkpoint, beside its bases; all are verified first.
        target: the new folder.

    Raises:
        ConfigError: the target exists.
        CheckpointError: the source or a base is missing or damaged, or the disk is full.
    """
    _rewrite(source, target, lambda full, entry: _own_shards(entry))


def _own_shards(entry: TableEntry) -> list[tuple[range, int, int]]:
    if not entry.shards:
        return [(range(entry.weight.shape[0]), 0, entry.weight.shape[1])]
    return [(one.rows, *one.columns) for one in entry.shards]


def new_folder(target: str | Path) -> Path:
    """Return a path that does not exist yet.

    Raises:
        ConfigError: it exists.
    """
    path = Path(target)
    tidy(path)
    if path.exists():
        raise ConfigError("the target folder exists", where=str(path), fix="choose another")
    return path


def _shards(
    full: str, entry: TableEntry, processes: int | None, plan: ShardingPlan | None
) -> list[tuple[range, int, int]]:
    """Return keys and columns of each new file of a table."""
    rows, dim = entry.weight.shape
    if entry.is_dynamic:
        return [(range(rows), 0, dim)]
    table = TableConfig(name=full, num_rows=rows, dim=dim)
    if plan is None:
        count = min(processes or 1, rows)
        found = TablePlan(table=full, kind="row", ranks=tuple(range(count)))
    else:
        known = [one for one in plan.tables if full == one.table or full.endswith(f".{one.table}")]
        if not known:
            raise ConfigError("the plan misses a table", value=full, allowed=", ".join(o.table for o in plan.tables))
        found = max(known, key=lambda one: len(one.table))
        ShardingPlan(world_size=plan.world_size, tables=(found.model_copy(update={"table": full}),)).check(
            {full: table}, plan.world_size
        )
    return [(shard.keys, shard.start, shard.stop) for shard in shards_of(found, table)]


def _cut(saved: SavedTable, work: Path, full: str, shards: list[tuple[range, int, int]]) -> TableEntry:
    entry = saved.entry.model_copy(update={"is_increment": False})
    count = len(shards)
    if entry.is_dynamic:
        write_tensors(work / table_file(full), saved.content())
        return entry.model_copy(update={"file": table_file(full), "shards": ()})
    narrow = [name for name in saved.names if not saved.meta(name)[0] and name not in _OF_ALL_COLUMNS]
    if any(stop - start < saved.dim for _, start, stop in shards) and narrow:
        raise ConfigError(
            "the optimizer of this table needs complete rows", where=f"table {full!r}", value="column",
            allowed="kind 'table', 'row', 'hybrid' or 'replicated'",
        )  # fmt: skip
    for i, (keys, start, stop) in enumerate(shards):
        tensors = {name: saved.read(name, keys, start, stop) for name in saved.names}
        write_tensors(work / table_file(full, i, count), tensors)
    if count == 1:
        return entry.model_copy(update={"file": table_file(full), "shards": ()})
    described = tuple(
        ShardEntry(file=table_file(full, i, count), keys=(k.start, k.stop, k.step), columns=(start, stop))
        for i, (k, start, stop) in enumerate(shards)
    )
    return entry.model_copy(update={"file": None, "shards": described})


# Comparison ---------------------------------------------------------------------------------------------------


def compare_checkpoints(one: str | Path, other: str | Path) -> list[dict[str, Any]]:
    """Return the differences between two checkpoints, one row per tensor; an empty list if they are equal bit for bit.

    A row has "tensor" and "difference", a sentence; if shapes and types agree also "numbers", how many elements
    differ, "of", the number of elements, and "largest", the largest absolute difference.
    """
    first, second = verify_checkpoint(one), verify_checkpoint(other)
    rows: list[dict[str, Any]] = []
    for name, mine, theirs in (("step", first.step, second.step), ("epoch", first.epoch, second.epoch)):
        if mine != theirs:
            rows.append({"tensor": name, "difference": f"{mine} and {theirs}"})
    for name in _DENSE_FILES:
        tensors = [
            read_tensors(Path(path) / name) if name in manifest.files else {}
            for path, manifest in ((one, first), (other, second))
        ]
        rows += _differences(name.removesuffix(".safetensors"), *tensors)
    for full in sorted(first.tables.keys() | second.tables.keys()):
        entries = first.tables.get(full), second.tables.get(full)
        if entries[0] is None or entries[1] is None:
            where = "second" if entries[0] is None else "first"
            rows.append({"tensor": f"table {full}", "difference": f"only in the {where}"})
        else:
            rows += _table_differences(full, open_table(one, first, full), open_table(other, second, full))
    return rows


def _differences(where: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in sorted(mine.keys() | theirs.keys()):
        label = f"{where}: {name}"
        if name not in mine or name not in theirs:
            rows.append({"tensor": label, "difference": f"only in the {'first' if name in mine else 'second'}"})
        elif mine[name].shape != theirs[name].shape or mine[name].dtype != theirs[name].dtype:
            kinds = " and ".join(
                f"{one.dtype}{list(one.shape)}".removeprefix("torch.") for one in (mine[name], theirs[name])
            )
            rows.append({"tensor": label, "difference": kinds})
        else:
            rows += _counted(label, [(mine[name], theirs[name])])
    return rows


def _table_differences(full: str, mine: SavedTable, theirs: SavedTable) -> list[dict[str, Any]]:
    where, rows = f"table {full}", []
    if mine.entry.step != theirs.entry.step:
        rows.append({"tensor": f"{where}: step", "difference": f"{mine.entry.step} and {theirs.entry.step}"})
    if mine.entry.is_dynamic or theirs.entry.is_dynamic or mine.entry.signature != theirs.entry.signature:
        if mine.entry.signature != theirs.entry.signature:
            return [*rows, {"tensor": where, "difference": f"{mine.entry.signature} and {theirs.entry.signature}"}]
        return rows + _differences(where, mine.content(), theirs.content())
    for name in sorted({*mine.names, *theirs.names}):
        if name not in mine.names or name not in theirs.names:
            rows.append(
                {
                    "tensor": f"{where}: {name}",
                    "difference": f"only in the {'first' if name in mine.names else 'second'}",
                }
            )
        else:
            rows += _counted(f"{where}: {name}", ((mine.read(name, k), theirs.read(name, k)) for k in pieces(mine)))
    return rows


def pieces(table: SavedTable) -> Iterator[range]:
    """Yield all keys of a table, a few megabytes of rows at a time."""
    step = max(1, _PIECE_ELEMENTS // max(1, table.dim))
    for start in range(0, table.num_rows, step):
        yield range(start, min(start + step, table.num_rows))


def _counted(label: str, pairs: Any) -> list[dict[str, Any]]:
    count, total, largest = 0, 0, 0.0
    for one, other in pairs:
        total += one.numel()
        unequal = _bits(one) != _bits(other)
        if bool(unequal.any()):
            count += int(unequal.sum())
            gaps = (one[unequal].double() - other[unequal].double()).abs()
            largest = max(largest, float(gaps.nan_to_num(nan=float("inf")).max()))
    if not count:
        return []
    what = f"{count:,} of {total:,} numbers differ, the largest by {largest:.3g}"
    return [{"tensor": label, "difference": what, "numbers": count, "of": total, "largest": largest}]


def _bits(tensor: Tensor) -> Tensor:
    """View floats as integers, so that NaN equals itself and -0 is not 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])
