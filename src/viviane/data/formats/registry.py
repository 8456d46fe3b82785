"""The registry of formats by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, DataError, DataNotFoundError, suggest
from viviane.data.formats.file_list import METADATA_FILE, is_file_list, read_file_list
from viviane.data.formats.format import Format
from viviane.data.formats.hugectr_parquet import HugectrParquetFormat
from viviane.data.formats.norm import NormFormat
from viviane.data.formats.parquet import ParquetFormat
from viviane.data.formats.raw import RawAsyncFormat, RawFormat
from viviane.data.formats.viviane import VivianeFormat

FORMATS: Final[dict[str, type[Format]]] = {
    "parquet": ParquetFormat,
    "viviane": VivianeFormat,
    "norm": NormFormat,
    "raw": RawFormat,
    "raw-async": RawAsyncFormat,
    "hugectr-parquet": HugectrParquetFormat,
}


def named_format(given: str | Format) -> Format:
    """Return a format from its name, with its default options, or the format unchanged.

    Raises:
        ConfigError: no format has that name.

    Example:
        >>> named_format("norm").check_sum
        True
    """
    return given if isinstance(given, Format) else format_of({"format": given})


def format_of(data: Any, where: str | None = None) -> Format:
    """Build a format from plain data: its name under "format", and its options.

    Raises:
        ConfigError: an unknown name or option.
    """
    name = data.get("format") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in FORMATS:
        fix = suggest(str(name), FORMATS)
        raise ConfigError("unknown data format", where=where, value=name, allowed=", ".join(FORMATS), fix=fix)
    return FORMATS[name].from_dict(data, where=where)


def guess_format(path: Path) -> Format:
    """Return the format of a path without a manifest: a folder of Parquet files, HugeCTR's folder, or a file list.

    Raises:
        DataError: the path does not exist, or is a file of unknown format.
    """
    if path.is_dir():
        return HugectrParquetFormat() if (path / METADATA_FILE).exists() else ParquetFormat()
    if not path.exists():
        raise DataNotFoundError(
            "data set folder not found", where=str(path), fix="pass the folder that contains schema.json"
        )
    if not is_file_list(path):
        raise DataError(
            "the format of the file is unknown",
            where=str(path),
            fix='specify it: Dataset(path, schema, format="norm"), or on the command line --from norm',
        )
    files = read_file_list(path)
    return HugectrParquetFormat() if files[0].suffix == ".parquet" else NormFormat()
