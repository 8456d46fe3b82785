"""The manifest of a checkpoint: its content, the step, and the size and checksum of every file.

    step-00001000/
        manifest.json               this manifest, with its own checksum
        dense.safetensors           parameters and buffers outside embedding tables, by name
        dense_optimizer.safetensors their optimizer state, "<parameter>:<state>"
        progress.safetensors        states of the random generators
        tables/<collection>.<table>.safetensors     weight, state.<name>, mean; for dynamic tables also keys, rows, ...
        tables/<collection>.<table>.1-of-4.safetensors  the same for one shard of a table
        history.json                rows of metrics so far

No file holds a pickle: nothing in a checkpoint can run code when it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from viviane.config.base import Settings, load_json
from viviane.core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, VivianeError
from viviane.core.file_names import file_inside
from viviane.core.files import file_sha256, write_json_atomic

MANIFEST_FILE: Final = "manifest.json"
DENSE_FILE: Final = "dense.safetensors"
OPTIMIZER_FILE: Final = "dense_optimizer.safetensors"
PROGRESS_FILE: Final = "progress.safetensors"
HISTORY_FILE: Final = "history.json"
FORMAT: Final = "viviane-checkpoint"
VERSION: Final = 1
SHARDED_VERSION: Final = 2  # tables with several files, which readers of version 1 do not support
INCREMENT_VERSION: Final = 3  # tables with a part of their rows, over those of another checkpoint
DYNAMIC_INCREMENT_VERSION: Final = 4  # the same for dynamic tables
KEYS: Final = "keys"
MAX_SHARDS: Final = 4096
"""Maximum number of files per table; comparing all pairs of that many takes seconds."""
_Size = Annotated[int, Field(ge=0, le=1 << 62)]


class FileEntry(Settings):
    """Size and checksum of one file."""

    bytes: int = Field(ge=0)
    sha256: str


class TensorEntry(Settings):
    """Shape and type of one parameter or buffer."""

    shape: tuple[_Size, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorEntry:
        """Describe a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class ShardEntry(Settings):
    """One shard of a table: a file with a range of keys and columns.

    Args:
        keys: start, stop, step of the range of keys; row i belongs to key start + i * step.
        columns: start, stop.
    """

    file: str
    keys: tuple[_Size, _Size, Annotated[int, Field(ge=1, le=1 << 62)]]
    columns: tuple[_Size, _Size]

    @property
    def rows(self) -> range:
        """The keys of the shard."""
        return range(*self.keys)

    def overlaps(self, other: ShardEntry) -> bool:
        """Return whether both hold an element of the same key and column."""
        if max(self.columns[0], other.columns[0]) >= min(self.columns[1], other.columns[1]):
            return False
        return bool(overlap(self.rows, other.rows))


class TableEntry(Settings):
    """One embedding table: the files of its rows and the names of its optimizer state.

    Args:
        file: file of the complete table; None if it has shards.
        shards: together they cover the table without overlap.
        weight: shape and type of the complete table, in increments too; a dynamic table has one row per key.
        has_mean: whether the running mean of its rows is stored too, as "mean".
        is_increment: whether its files hold only rows that changed since the base of the checkpoint, and their keys.
    """

    file: str | None = None
    shards: tuple[ShardEntry, ...] = ()
    weight: TensorEntry
    state: tuple[str, ...] = ()
    has_mean: bool = False
    step: int = 0
    is_dynamic: bool = False
    is_increment: bool = False

    @property
    def signature(self) -> str:
        """Type and shape, equal in a checkpoint and a module; the number of rows of a dynamic table may differ."""
        return f"{self.weight.dtype}[keys, {self.weight.shape[1]}]" if self.is_dynamic else str(self.weight)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of the table."""
        return (self.file,) if self.file is not None else tuple(shard.file for shard in self.shards)

    @model_validator(mode="after")
    def _check(self) -> TableEntry:
        if (self.file is None) != bool(self.shards):
            raise ValueError("a table must have either a file or shards")
        if len(self.weight.shape) != 2:
            raise ValueError(f"a table must have two dimensions, not the shape {list(self.weight.shape)}")
        if self.is_increment and self.has_mean:
            raise ValueError("a table with a mean is whole in every checkpoint")
        if self.shards:
            self._check_shards()
        return self

    def _check_shards(self) -> None:
        """Refuse shards that exceed the table, leave a gap, or overlap."""
        rows, dim = self.weight.shape
        if len(self.shards) > MAX_SHARDS:
            raise ValueError(f"{len(self.shards)} shards, at most {MAX_SHARDS} are allowed")
        if self.is_dynamic:
            raise ValueError("a dynamic table must have exactly one file")
        for one in self.shards:
            if not (one.columns[0] <= one.columns[1] <= dim and (not one.rows or one.rows[-1] < rows)):
                raise ValueError(f"the shard {one.file!r} exceeds the bounds of the table")
        if sum(len(one.rows) * (one.columns[1] - one.columns[0]) for one in self.shards) != rows * dim:
            raise ValueError("the shards do not cover the table")
        for twice in _overlapping(self.shards):
            raise ValueError(f"the shards {twice[0].file!r} and {twice[1].file!r} overlap")

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit absent fields: a table without shards is described as in version 1."""
        body: dict[str, Any] = serialize(self)
        del body["shards" if self.file is not None else "file"]
        for name in ("has_mean", "is_increment"):
            if not body[name]:
                del body[name]
        return body


class BaseEntry(Settings):
    """The checkpoint that an incremental one continues.

    Args:
        folder: its name, beside the incremental one.
        sha256: the check sum of its manifest.
    """

    folder: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=255)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Settings):
    """The content of a checkpoint.

    Args:
        step, epoch: position of training.
        dense: parameters and buffers outside tables.
        optimizer_state: False if only weights were saved.
        tables: embedding tables, by "<collection>.<table>".
        progress: state of the training loop: reader position, generators, early stopping.
        files: every other file of the folder.
        plans: sharding plans of collections over several processes, by name, as `Solver.plan` accepts them.
        base: the checkpoint that has the rows which an incremental one leaves out; None if all tables are whole.
    """

    format: Literal["viviane-checkpoint"] = FORMAT
    version: int = VERSION
    viviane: str
    torch: str
    step: int
    epoch: int
    dense: dict[str, TensorEntry]
    optimizer_state: bool
    dense_optimizer_values: dict[str, Any]
    tables: dict[str, TableEntry]
    progress: dict[str, Any]
    files: dict[str, FileEntry]
    plans: dict[str, Any] = Field(default_factory=dict)
    base: BaseEntry | None = None

    @model_validator(mode="after")
    def _check_base(self) -> Manifest:
        if self.base is None and any(table.is_increment for table in self.tables.values()):
            raise ValueError("a table is an increment, but the checkpoint names no base")
        return self

    @model_serializer(mode="wrap")
    def _without_base(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit an absent base: a checkpoint without one is described as in version 2."""
        body: dict[str, Any] = serialize(self)
        if self.base is None:
            body.pop("base", None)
        return body


def _overlapping(shards: Sequence[ShardEntry]) -> Iterator[tuple[ShardEntry, ShardEntry]]:
    """Yield pairs of shards that overlap.

    Shards with equal columns and steps are sorted, so that only neighbours are compared; all others are compared in
    pairs.
    """
    kinds: dict[tuple[int, ...], list[ShardEntry]] = {}
    for one in shards:
        if one.rows:
            kinds.setdefault((*one.columns, one.keys[2]), []).append(one)
    for alike in kinds.values():
        alike.sort(key=lambda one: (one.keys[0] % one.keys[2], one.keys[0]))
        yield from ((one, other) for one, other in pairwise(alike) if one.overlaps(other))
    groups = list(kinds.values())
    for number, group in enumerate(groups):
        for later in groups[number + 1 :]:
            yield from ((one, other) for one in group for other in later if one.overlaps(other))


def version_of(tables: Mapping[str, TableEntry]) -> int:
    """Return the version of the format that tables need."""
    increments = [table for table in tables.values() if table.is_increment]
    if increments:
        return DYNAMIC_INCREMENT_VERSION if any(table.is_dynamic for table in increments) else INCREMENT_VERSION
    return SHARDED_VERSION if any(table.shards for table in tables.values()) else VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, with its own checksum.

    Raises:
        CheckpointError: two tables would have the same file.
    """
    _check_names(manifest, folder / MANIFEST_FILE)
    body = manifest.to_dict()
    write_json_atomic(folder / MANIFEST_FILE, {**body, "sha256": _seal(body)})


def read_manifest(folder: str | Path) -> Manifest:
    """Read and verify the manifest only; `increments.verify_checkpoint` also verifies the other files.

    Raises:
        CheckpointError: the folder has no checkpoint, its format is unknown, the manifest was altered, or it names
            files outside the folder.
    """
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        fix = "pass a folder with manifest.json"
        inside = sorted(one.parent for one in Path(folder).glob(f"*/{MANIFEST_FILE}")) or sorted(
            one.parent for one in Path(folder).glob(f"checkpoints/*/{MANIFEST_FILE}")
        )
        if inside:
            fix = f"pass one of those inside: {', '.join(map(str, inside[-3:]))}"
        raise CheckpointNotFoundError("no checkpoint found", where=str(path), fix=fix)
    try:
        body = load_json(path)
    except VivianeError as error:
        raise CheckpointError(
            "the checkpoint's manifest was truncated or altered", where=str(path), value=error.value
        ) from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError("not a checkpoint of Viviane", where=str(path), allowed=f"format {FORMAT!r}")
    if body.get("version") not in range(VERSION, DYNAMIC_INCREMENT_VERSION + 1):
        raise CheckpointError(
            "the checkpoint has an unsupported format version",
            where=str(path),
            value=body.get("version"),
            allowed=f"version {VERSION} to {DYNAMIC_INCREMENT_VERSION}",
            fix=f"read it with viviane {body.get('viviane')}, which wrote it",
        )
    sealed = body.pop("sha256", None)
    if sealed != _seal(body):
        raise CheckpointError(
            "the checkpoint's manifest was altered: its checksum differs",
            where=str(path),
            fix="use another checkpoint",
        )
    try:
        manifest = Manifest.from_dict(body, where=str(path))
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint's manifest is malformed", where=error.where, value=error.what, fix="use another checkpoint"
        ) from error
    _check_names(manifest, path)
    return manifest


def _check_names(manifest: Manifest, path: Path) -> None:
    """Refuse names that escape the folder, and files that would be read without being listed."""
    for name in manifest.files:
        file_inside(path.parent, name, where=str(path), error=CheckpointError)
    owner: dict[str, str] = {}
    listed = [(f"table {full!r}", name) for full, entry in manifest.tables.items() for name in entry.files]
    for what, name in [("the dense weights", DENSE_FILE), *listed]:
        if name not in manifest.files or name == MANIFEST_FILE:
            raise CheckpointError(
                "the manifest names a file that it does not list", where=f"{path}, {what}", value=name,
                allowed="a name under \"files\", with size and checksum", fix="use another checkpoint",
            )  # fmt: skip
        if name in owner:
            raise CheckpointError(
                "two parts of the checkpoint name the same file", where=f"{path}, {owner[name]} and {what}", value=name,
                fix="use another checkpoint",
            )  # fmt: skip
        owner[name] = what


def manifest_seal(folder: str | Path) -> str:
    """Return the check sum of a checkpoint's manifest, which stands in it; `read_manifest` verifies it."""
    found: str = load_json(Path(folder) / MANIFEST_FILE)["sha256"]
    return found


def verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read some files of a checkpoint and compare sizes and checksums; raises as `verify_checkpoint` does."""
    for name in names:
        entry = manifest.files[name]
        file = file_inside(path, name, where=str(path / MANIFEST_FILE), error=CheckpointError)
        if not file.is_file():
            raise CheckpointError("a file of the checkpoint is missing", where=str(file), fix="use another checkpoint")
        size = file.stat().st_size
        if size != entry.bytes:
            kind = "truncated" if size < entry.bytes else "altered: it is too long"
            raise CheckpointError(
                f"a file of the checkpoint was {kind}",
                where=str(file),
                value=f"{size} bytes",
                allowed=f"{entry.bytes} bytes",
                fix="use another checkpoint",
            )
        found = file_sha256(file)
        if found != entry.sha256:
            raise CheckpointError(
                "a file of the checkpoint was altered: its checksum differs",
                where=str(file),
                value=found,
                allowed=entry.sha256,
                fix="use another checkpoint",
            )


def _seal(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def overlap(one: range, other: range) -> range:
    """Return the intersection of two ranges of keys with positive steps.

    With steps s and t the common keys are lcm(s, t) apart; the Chinese remainder theorem gives the first.

    Example:
        >>> list(overlap(range(1, 30, 4), range(0, 30, 3)))
        [9, 21]
        >>> list(overlap(range(0, 10, 2), range(1, 10, 2)))
        []
    """
    if not one or not other:
        return range(0)
    common = gcd(one.step, other.step)
    distance = other.start - one.start
    if distance % common:
        return range(0)
    step = one.step // common * other.step
    turns = distance // common * pow(one.step // common, -1, other.step // common) % (other.step // common)
    first = one.start + turns * one.step
    missing = max(one.start, other.start) - first
    if missing > 0:
        first += -(-missing // step) * step
    return range(first, min(one[-1], other[-1]) + 1, step)


def positions(part: range, whole: range) -> slice:
    """Return the positions in `whole` of the keys of `part`; `whole` must contain them all.

    Example:
        >>> positions(range(9, 22, 12), range(1, 30, 4))
        slice(2, 6, 3)
    """
    start = (part[0] - whole.start) // whole.step
    step = max(1, part.step // whole.step)
    return slice(start, start + (len(part) - 1) * step + 1, step)
