"""The formats of data sets: Parquet, Viviane's own, and HugeCTR's."""

from viviane.core.data_manifest import MANIFEST_FILE
from viviane.data.formats.format import Format
from viviane.data.formats.hugectr_parquet import HugectrParquetFormat
from viviane.data.formats.manifest import Manifest
from viviane.data.formats.norm import NormFormat
from viviane.data.formats.parquet import ParquetFormat
from viviane.data.formats.raw import RawAsyncFormat, RawFormat
from viviane.data.formats.registry import FORMATS, format_of, guess_format, named_format
from viviane.data.formats.viviane import VivianeFormat

__all__ = [
    "FORMATS",
    "MANIFEST_FILE",
    "Format",
    "HugectrParquetFormat",
    "Manifest",
    "NormFormat",
    "ParquetFormat",
    "RawAsyncFormat",
    "RawFormat",
    "VivianeFormat",
    "format_of",
    "guess_format",
    "named_format",
]
