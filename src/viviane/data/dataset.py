"""A data set: files in a supported format and their schema, checked when opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

from viviane.batch import Batch
from viviane.core.errors import ConfigError, DataError, DataNotFoundError, SchemaError, expect
from viviane.core.file_names import file_inside
from viviane.core.html import html_table
from viviane.core.json_files import read_json_object
from viviane.core.locations import AnyPath, RemotePath, location
from viviane.core.remote.cache import local_copy
from viviane.core.remote.published import published_location
from viviane.data.formats import MANIFEST_FILE, Format, Manifest, guess_format, named_format
from viviane.data.formats.file_list import FILE_LIST, METADATA_FILE
from viviane.data.reader import DEFAULT_SHUFFLE_ROWS, Reader
from viviane.schema import SCHEMA_FILE, Schema

INFO_FILE: Final = "info.json"
_OWN_FILES: Final = (MANIFEST_FILE, SCHEMA_FILE, INFO_FILE, "etl.zip", "key_sets.safetensors")
"""Files of a data set's folder beside its rows. A model takes etl.zip along."""


class Dataset:
    """Rows on disk with their schema.

    A folder `part-00000.parquet, ...` with `schema.json`, or a folder with `manifest.json` in any other format of
    `viviane.data.formats`: both are recognized. Other files are opened with an explicit schema and format.

    Opening checks only what is cheap: the footer of every Parquet file, headers and sizes of others. Values are
    checked when rows are read: ids against num_ids, no nulls, finite dense values and weights, binary labels
    0 or 1, bags no longer than max_length.

    Args:
        path: the folder; for other formats also a file or a file list. A URL (s3://, gs://, hdfs://) is a folder:
            Parquet is read over the network by byte ranges, other formats are copied to the local cache.
        schema: read the files with this schema, such as a model's, instead of the folder's.
        format: name of a format, or a format with its options: "norm", RawFormat(num_samples=1000).
        stored: all columns of the files in a format without schema.json, if `schema` has only some of them.

    Raises:
        DataError: the folder or its data files are missing, or a file is truncated.
        SchemaError: the schema is missing, or the columns of the files differ from it.
        ConfigError: the format is unknown, or differs from the manifest.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> folder = Path(tempfile.mkdtemp()) / "train"
        >>> data = write_dataset(folder, schema, [{"y": [0.0, 1.0, 1.0], "c": [3, 4, 5]}])
        >>> len(data), [batch.size for batch in data.reader(2)]
        (3, [2, 1])
    """

    def __init__(
        self,
        path: str | AnyPath,
        schema: Schema | None = None,
        format: str | Format | None = None,  # noqa: A002 - the word on the command line
        *,
        stored: Schema | None = None,
    ) -> None:
        if schema is not None:
            expect("schema", schema, Schema)
        if format is not None:
            expect("format", format, str, Format)
        given = None if format is None else named_format(format)
        self.path = _readable(path, given)
        self.manifest = manifest = Manifest.load(self.path)
        local = cast(Path, self.path)  # a remote path has passed `_readable`: it is Parquet, which accepts both
        if manifest is not None:
            if given is not None and given.format != manifest.format.format:
                raise ConfigError(
                    "the folder is in another format", where=str(path), value=given.format,
                    allowed=manifest.format.format, fix="remove `format`: the manifest specifies it",
                )  # fmt: skip
            self.format = given or manifest.format
            files: Sequence[AnyPath] = manifest.paths(self.path)
            entries, stored = manifest.files, manifest.stored
            schema = schema or Schema.load(self.path)
        else:
            self.format = given or guess_format(local)
            if self.format.format == "parquet" and not self.path.is_dir():
                fix = "pass the folder that contains schema.json; other files need `format`"
                raise DataNotFoundError("data set folder not found", where=str(path), fix=fix)
            if schema is None:
                schema = Schema.load(self.path if self.path.is_dir() else self.path.with_name(SCHEMA_FILE))
            files, entries, stored = self.format.files_at(local), None, stored or schema
        schema = self.format.schema_of(files, schema)
        self.schema, self.stored = schema, stored
        self.storage = self.format.open(cast("Sequence[Path]", files), stored, schema, entries)
        self.files, self.stamps, self.groups = self.storage.files, self.storage.stamps, self.storage.groups
        self.num_rows = sum(group.num_rows for group in self.groups)
        self.is_whole = True
        """Whether it has all row groups of its files."""

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {self.num_rows} rows in {len(self.files)} file(s))"

    def _repr_html_(self) -> str:
        """Return path, size and columns, for notebooks."""
        rows: list[list[Any]] = [["folder", str(self.path)], ["rows", self.num_rows], ["files", len(self.files)]]
        facts = html_table("Dataset", ["", ""], [*rows, ["format", self.format.format]])
        return facts + self.schema._repr_html_()

    @cached_property
    def info(self) -> dict[str, Any]:
        """Statistics that the writer stored in info.json: rows, source, best reachable AUC; empty without the file."""
        path = self.path / INFO_FILE
        return read_json_object(path, error=DataError) if path.exists() else {}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of schema, file names, sizes and row counts: equal for equal data sets, cheap for any size."""
        rows = [0] * len(self.files)
        for group in self.groups:
            rows[group.file] += group.num_rows
        content = [
            self.schema.to_dict(),
            [[file.name, stamp[0], n] for file, stamp, n in zip(self.files, self.stamps, rows, strict=True)],
            [[group.file, group.num_rows] for group in self.groups],
        ]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def verify(self) -> int:
        """Compare every file with its checksum in the manifest; return the number of bytes compared.

        Without a manifest (data sets written before 0.2, or by other programs) nothing is compared, and the result is
        0: `check` still reads every row, and compares checksums of Parquet pages if the files have them.

        Raises:
            DataError: a file was altered, truncated or removed.
            SchemaError: schema.json was altered.
        """
        if self.manifest is None:
            return 0
        lines = self.manifest.stored.difference(Schema.load(self.path))
        if lines:
            raise SchemaError(
                "schema.json was altered since the data set was written: " + "; ".join(lines[:5]),
                where=str(self.path / SCHEMA_FILE), fix="copy or write the data set again",
            )  # fmt: skip
        return self.manifest.verify(self.path)

    def check(self) -> None:
        """Read every row once and check every value.

        Raises:
            DataError, KeyRangeError, SchemaError: the first problem, with file, row group, column and row.
        """
        for group in self.groups:
            self.storage.view(group)

    def head(self, num_rows: int = 5) -> Batch:
        """Return the first rows in the order of the files.

        Raises:
            ConfigError: fewer than one row is requested.
            DataError: the data set has no rows.
        """
        if num_rows < 1:
            raise ConfigError("head takes at least one row", value=num_rows)
        with self.reader(num_rows, num_threads=1) as reader:
            for batch in reader:
                return batch
        raise DataError("the data set has no rows", where=str(self.path))

    def reader(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        epoch: int = 0,
        num_threads: int = 2,
        shuffle_rows: int = DEFAULT_SHUFFLE_ROWS,
        max_batches: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        pin_memory: bool = False,
        until_epoch: int = 0,
    ) -> Reader:
        """Return a reader of this data set's batches; see Reader for the arguments."""
        return Reader(
            self,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            epoch=epoch,
            num_threads=num_threads,
            shuffle_rows=shuffle_rows,
            max_batches=max_batches,
            rank=rank,
            num_ranks=num_ranks,
            pin_memory=pin_memory,
            until_epoch=until_epoch,
        )


def _readable(path: str | AnyPath, given: Format | None) -> AnyPath:
    """Return the path to read from: a local path, a remote folder of Parquet, or the local copy of a remote folder.

    Raises:
        DataError: the URL has no folder.
    """
    place = published_location(path)
    if not isinstance(place, RemotePath):
        for name in _OWN_FILES:
            file_inside(place, name, where=str(place))  # no link to the outside, no pipe, no folder
        return place
    if not place.is_dir():
        raise DataNotFoundError("no data set folder found at this URL", where=str(path),
                        fix="pass the folder that contains schema.json; download a single file first")  # fmt: skip
    if given is not None and given.format == "parquet":
        return place
    if (place / MANIFEST_FILE).is_file():
        manifest = Manifest.load(place)
        return place if manifest is not None and manifest.format.format == "parquet" else local_copy(location(path))
    foreign = given is not None or any((place / name).is_file() for name in (METADATA_FILE, FILE_LIST))
    return local_copy(location(path)) if foreign else place
