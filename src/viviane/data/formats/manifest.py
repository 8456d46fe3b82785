"""manifest.json: the format of a data set folder, its columns, and its files with rows, bytes and checksums.

It is written last, so a folder with a manifest is complete. A folder of Parquet files does not need a manifest: then
every file in it belongs to the data set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import SerializeAsAny, field_validator

from viviane.config.base import Settings, load_json
from viviane.core.data_manifest import MANIFEST_FILE, write_data_manifest
from viviane.core.errors import ConfigError, DataError
from viviane.core.file_names import check_file_name, file_inside
from viviane.core.files import file_sha256
from viviane.core.locations import AnyPath
from viviane.data.formats.format import FileEntry, Format
from viviane.data.formats.registry import format_of
from viviane.schema import Schema

_PIECE_BYTES: Final = 8 << 20


class Manifest(Settings):
    """The content of a data set folder.

    Args:
        format: the format with its options.
        stored: every column in the files, in order.
        files: names inside the folder, rows, bytes and checksums, in the order of their rows.
    """

    version: Literal[1] = 1
    format: SerializeAsAny[Format]
    stored: Schema
    files: tuple[FileEntry, ...]

    @field_validator("format", mode="before")
    @classmethod
    def _choose(cls, value: Any) -> Any:
        return format_of(value) if isinstance(value, dict) else value

    @classmethod
    def load(cls, folder: AnyPath) -> Manifest | None:
        """Return the manifest of a folder, or None without one.

        Raises:
            DataError: the file is damaged.
        """
        file = folder / MANIFEST_FILE
        if not file.is_file():
            return None
        try:
            return cls.from_dict(load_json(file), where=str(file))
        except ConfigError as error:
            raise DataError(
                "the manifest is damaged", where=str(file), value=str(error), fix="copy or write the data set again"
            ) from error

    @classmethod
    def write(cls, folder: Path, format: Format, stored: Schema, files: Iterable[FileEntry]) -> None:  # noqa: A002
        """Write the manifest of finished files, with their checksums."""
        plain = (one.model_dump(mode="json", exclude_none=True) for one in files)
        write_data_manifest(folder, format.to_dict(), stored.to_dict(), plain)

    def paths(self, folder: AnyPath) -> list[AnyPath]:
        """Return the files.

        Raises:
            DataError: a file is missing or outside the folder; a Parquet folder contains unlisted files.
        """
        where, twice = str(folder / MANIFEST_FILE), set()
        paths: list[AnyPath] = []
        for entry in self.files:
            check_file_name(entry.name, where=where)
            if entry.name in twice:
                raise DataError("the manifest names a file twice", where=where, value=entry.name)
            twice.add(entry.name)
            path: AnyPath = folder / entry.name
            if isinstance(folder, Path):
                path = file_inside(folder, entry.name, where=where)
                if not path.is_file():
                    fix = "copy the data set again"
                    raise DataError("a file of the manifest is missing", where=str(path), fix=fix)
            paths.append(path)
        if self.format.format == "parquet":
            self._refuse_others(folder)
        return paths

    def _refuse_others(self, folder: AnyPath) -> None:
        """Refuse Parquet files that the manifest does not list, which would be ignored silently."""
        listed = {entry.name for entry in self.files}
        for file in sorted(one.name for one in folder.glob("*.parquet")):
            if file not in listed and not file.startswith((".", "_")):
                raise DataError(
                    "the folder contains a Parquet file that its manifest does not list", where=str(folder / file),
                    fix=f"remove the file; or, if it belongs to the data set, remove {MANIFEST_FILE}: then every "
                    "Parquet file is read, without checksums",
                )  # fmt: skip

    def verify(self, folder: AnyPath) -> int:
        """Compare the checksum of every file; return the bytes compared, without files that have none.

        Raises:
            DataError: a file is missing, truncated or altered.
        """
        total = 0
        for entry, path in zip(self.files, self.paths(folder), strict=True):
            size = path.stat().st_size
            if size != entry.bytes:
                raise _altered(path, f"{size} bytes", f"{entry.bytes} bytes")
            if entry.sha256 is None:
                continue
            found = _sha256(path)
            if found != entry.sha256:
                raise _altered(path, f"SHA-256 {found}", f"SHA-256 {entry.sha256}")
            total += size
        return total


def _sha256(path: AnyPath) -> str:
    if isinstance(path, Path):
        return file_sha256(path)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
        return digest.hexdigest()


def _altered(path: AnyPath, value: str, allowed: str) -> DataError:
    return DataError(
        "a file of the data set was altered since it was written", where=str(path), value=value, allowed=allowed,
        fix="copy or write the data set again",
    )  # fmt: skip
