"""manifest.json: the format of a data set folder, the columns in its files, and the files with rows and bytes.

It is written last, so a folder with a manifest is complete. A folder of Parquet files needs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import SerializeAsAny, field_validator

from viviane.config.base import Settings, load_json
from viviane.core.errors import ConfigError, DataError
from viviane.core.locations import AnyPath
from viviane.data.formats.format import FileEntry, Format
from viviane.data.formats.registry import format_of
from viviane.schema import Schema

MANIFEST_FILE: Final = "manifest.json"


class Manifest(Settings):
    """What a data set folder holds.

    Args:
        format: the format with its options.
        stored: every column in the files, in order.
        files: their names inside the folder, rows and bytes, in the order of their rows.
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

    def paths(self, folder: Path) -> list[Path]:
        """Return the files.

        Raises:
            DataError: one is missing.
        """
        for entry in self.files:
            if not (folder / entry.name).is_file():
                raise DataError(
                    "a file of the manifest is missing", where=str(folder / entry.name), fix="copy the data set again"
                )
        return [folder / entry.name for entry in self.files]
