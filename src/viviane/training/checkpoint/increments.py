"""Incremental checkpoints: tables that hold only the rows that changed since a base, and the chain back to whole ones.

A file of an increment has "keys" (n,), rising, and the rows of these keys, "weight" and "state.<name>"; of a dynamic
table see `dynamic_increments`. A table is read from the newest whole table of the chain and all increments after it. A
checkpoint names its base by its folder, which stands beside it, and by the check sum of the base's manifest, so that
another checkpoint is not taken for it.

`viviane.store.delta` has another purpose: messages of at most 1 MiB with weights alone, which servers apply in turn.
These files hold optimizer state, of any size, and are mapped by key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from viviane.core.errors import CheckpointError, CheckpointNotFoundError
from viviane.training.checkpoint.dynamic_increments import IncrementedKeys
from viviane.training.checkpoint.manifest import (
    KEYS,
    BaseEntry,
    Manifest,
    ShardEntry,
    TableEntry,
    manifest_seal,
    read_manifest,
    verify_files,
)
from viviane.training.checkpoint.saved_table import SavedTable
from viviane.training.checkpoint.table_parts import TablePart, TieredRows
from viviane.training.checkpoint.tensor_files import Source, UnchangedTensor, unchanged_tensors

_MOST_BASES: Final = 10_000


class IncrementedTable(SavedTable):
    """A table with the rows of an increment over those of its base.

    Args:
        folder: the checkpoint.
        entry: of the increment.
        base: the table before it.
    """

    def __init__(self, folder: Path, entry: TableEntry, base: SavedTable) -> None:
        super().__init__(folder, entry)
        self._base = base

    def _check(self, shard: ShardEntry, found: dict[str, Tensor]) -> None:
        where, columns, every = self.folder / shard.file, shard.columns[1] - shard.columns[0], range(*shard.keys)
        keys = found.get(KEYS)
        if keys is None or keys.dtype != torch.int64 or keys.dim() != 1:
            raise CheckpointError("an increment has no list of its keys", where=str(where))
        inside = not len(keys) or bool(
            (keys.diff() > 0).all() and every and keys[0] >= every[0] and keys[-1] <= every[-1]
            and ((keys - every.start) % every.step == 0).all()
        )  # fmt: skip
        if not inside:
            raise CheckpointError("the keys of an increment do not rise, or are not those of its shard",
                                  where=str(where), allowed=str(every))  # fmt: skip
        for name in self.names:
            shape = tuple(found[name].shape) if name in found else None
            if shape != (len(keys), columns) and not (name != "weight" and shape == (len(keys),)):
                raise CheckpointError(
                    "a table's file does not match the manifest", where=f"{where}, {name}", value=shape,
                    allowed=str((len(keys), columns)),
                )  # fmt: skip

    def check_files(self) -> None:
        """Compare the shapes in the files of the table and of its base with their manifests, see `SavedTable`."""
        self._base.check_files()
        super().check_files()

    def meta(self, name: str) -> tuple[bool, torch.dtype]:
        """Return whether a tensor has one element per column, and its type."""
        return self._base.meta(name)

    def copy_to(self, name: str, target: Tensor, keys: range, start: int, stop: int) -> None:
        """Fill a tensor with the rows of a range of keys and columns, see `SavedTable.copy_to`."""
        if not keys:
            return
        self._base.copy_to(name, target, keys, start, stop)
        for shard in self._shards:
            low, high = max(start, shard.columns[0]), min(stop, shard.columns[1])
            found = self.tensors(shard)
            bounds = torch.tensor([keys[0], keys[-1] + 1])
            first, last = torch.searchsorted(found[KEYS], bounds).tolist()
            places = found[KEYS][first:last] - keys.start
            own = (places % keys.step == 0).nonzero().view(-1)
            if low >= high or not len(own):
                continue
            rows, to = found[name][first:last][own], (places[own] // keys.step).to(target.device)
            if target.dim() == 1:
                target[to] = rows.to(target.device)
            else:
                columns = rows[:, low - shard.columns[0] : high - shard.columns[0]]
                target[to, low - start : high - start] = columns.to(target.device)


# Reading ------------------------------------------------------------------------------------------------------


def chain_of(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, Manifest]]:
    """Yield the checkpoint, its base, the base of that, up to one with whole tables.

    Raises:
        CheckpointError: a base is missing, or is not the one that the checkpoint was written after.
    """
    yield folder, manifest
    for _ in range(_MOST_BASES):
        base = manifest.base
        if base is None:
            return
        place = folder.parent / base.folder
        fix = f"put {base.folder} beside it; or use a checkpoint that was compacted (viviane checkpoint compact)"
        try:
            found, seal = read_manifest(place), manifest_seal(place)
        except CheckpointNotFoundError as error:
            raise CheckpointError("the base of an incremental checkpoint is missing", where=str(folder),
                                  value=str(place), fix=fix) from error  # fmt: skip
        if seal != base.sha256 or found.step >= manifest.step:
            raise CheckpointError("the base of an incremental checkpoint is another checkpoint", where=str(folder),
                                  value=str(place), fix=fix)  # fmt: skip
        folder, manifest = place, found
        yield folder, manifest
    raise CheckpointError("a chain of incremental checkpoints has no end", where=str(folder))


def open_table(folder: str | Path, manifest: Manifest, full: str) -> SavedTable:
    """Map a table of a checkpoint, with the rows of its bases where it is an increment.

    Raises:
        CheckpointError: a base is missing, or its table has another form.
    """
    chain: list[tuple[Path, TableEntry]] = []
    for place, content in chain_of(Path(folder), manifest):
        entry = content.tables.get(full)
        alike = entry is not None and (not chain or _form(entry) == _form(chain[0][1]))
        if entry is None or not alike:
            raise CheckpointError("the table of a base has another form", where=f"{place}, table {full!r}",
                                  value="absent" if entry is None else entry.signature)  # fmt: skip
        chain.append((place, entry))
        if not entry.is_increment:
            break
    if chain[0][1].is_dynamic and len(chain) > 1:
        return IncrementedKeys([SavedTable(place, entry) for place, entry in reversed(chain)])
    place, entry = chain.pop()
    found = SavedTable(place, entry)
    while chain:
        place, entry = chain.pop()
        found = IncrementedTable(place, entry, found)
    return found


def _form(entry: TableEntry) -> tuple[str, tuple[str, ...]]:
    return entry.signature, entry.state


def needed_files(folder: Path, manifest: Manifest) -> list[tuple[Path, Manifest, str]]:
    """Return every file of a checkpoint, and those of its bases that its tables are read from."""
    found = [(folder, manifest, name) for name in manifest.files]
    wanted = {full for full, entry in manifest.tables.items() if entry.is_increment}
    for place, content in list(chain_of(folder, manifest))[1:]:
        own = {full: entry for full, entry in content.tables.items() if full in wanted}
        found += [(place, content, name) for entry in own.values() for name in entry.files]
        wanted = {full for full, entry in own.items() if entry.is_increment}
    return found


def verify_checkpoint(folder: str | Path) -> Manifest:
    """Read every file of a checkpoint and of the bases that it needs, and compare sizes and checksums.

    Raises:
        CheckpointError: a file is missing, truncated or altered; the message names it.
    """
    manifest = read_manifest(folder)
    for place, content, name in needed_files(Path(folder), manifest):
        verify_files(place, content, [name])
    return manifest


def base_of(folder: Path) -> BaseEntry:
    """Return how the next checkpoint names this one as its base."""
    return BaseEntry(folder=folder.name, sha256=manifest_seal(folder))


# Writing ------------------------------------------------------------------------------------------------------


def changed_sources(part: TablePart, live: dict[str, Tensor], rows: Tensor) -> dict[str, Source]:
    """Return the sources of an increment's file; rows in tiers are read when they are written.

    Args:
        part: of the table, on this process.
        live: copies of its changed rows; of a table in tiers the shapes of all.
        rows: of the part that have changed, rising.
    """
    storage = part.storage
    if storage is not None and storage.is_dynamic:
        return unchanged_tensors(live)  # its keys are among them
    keys: Source = UnchangedTensor(part.keys.start + rows * part.keys.step)
    found = {KEYS: keys}
    for name, one in live.items():
        if storage is not None and storage.in_tiers:
            found[name] = TieredRows(storage, part.table, name, rows.numpy())
        else:
            found[name] = UnchangedTensor(one)
    return found
