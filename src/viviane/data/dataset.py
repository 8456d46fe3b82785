"""A data set: a folder of Parquet files with its schema, checked when it is opened."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from viviane.batch import Batch
from viviane.config.base import load_json
from viviane.core.errors import ConfigError, DataError
from viviane.data.block import Block
from viviane.data.decode import FileStamp, decode_group, open_parquet, stamp
from viviane.data.plan import Group
from viviane.data.reader import DEFAULT_SHUFFLE_ROWS, Reader
from viviane.schema import SCHEMA_FILE, Schema

INFO_FILE: Final = "info.json"


class Dataset:
    """A folder `part-00000.parquet, ...` with `schema.json` and perhaps `info.json`.

    Opening reads the footer of every file: all columns must have the schema's names and types. Values are
    checked when rows are read: ids against num_ids, no nulls, dense numbers and weights finite, binary labels
    0 or 1, bags no longer than max_length.

    Args:
        path: the folder.
        schema: read the files by this schema (a model's, say) instead of the folder's own.

    Raises:
        DataError: no such folder, no Parquet file in it, or one that is truncated.
        SchemaError: no schema, or files whose columns are not the schema's.

    Example:
        >>> import tempfile
        >>> from viviane.data import write_dataset
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> folder = Path(tempfile.mkdtemp()) / "train"
        >>> data = write_dataset(folder, schema, [{"y": [0.0, 1.0, 1.0], "c": [3, 4, 5]}])
        >>> len(data), [batch.size for batch in data.reader(2)]
        (3, [2, 1])
    """

    def __init__(self, path: str | Path, schema: Schema | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError("no such data set folder", where=str(path), fix="give the folder that holds schema.json")
        self.schema = schema if schema is not None else Schema.load(self.path / SCHEMA_FILE)
        self.files: list[Path] = sorted(
            file for file in self.path.glob("*.parquet") if not file.name.startswith((".", "_"))
        )
        if not self.files:
            raise DataError("the data set has no Parquet files", where=str(path), fix="write it with `viviane etl`")
        self.stamps: list[FileStamp] = []
        self.groups: list[Group] = []
        for number, file in enumerate(self.files):
            self._add_footer(number, file)
        self.num_rows = sum(group.num_rows for group in self.groups)

    def _add_footer(self, number: int, path: Path) -> None:
        self.stamps.append(stamp(path))
        with open_parquet(path, self.schema) as file:
            row = 0
            for index in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(index).num_rows
                self.groups.append(Group(number, index, row, rows))
                row += rows

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {self.num_rows} rows in {len(self.files)} file(s))"

    @cached_property
    def info(self) -> dict[str, Any]:
        """Statistics that the writer left in info.json: rows, source, best reachable AUC; empty without the file."""
        path = self.path / INFO_FILE
        return dict(load_json(path)) if path.exists() else {}

    @cached_property
    def fingerprint(self) -> str:
        """A hash over schema, file names, sizes and row counts: equal for equal data sets, cheap for any size."""
        rows = [0] * len(self.files)
        for group in self.groups:
            rows[group.file] += group.num_rows
        content = [
            self.schema.to_dict(),
            [[file.name, stamp[0], n] for file, stamp, n in zip(self.files, self.stamps, rows, strict=True)],
            [[group.file, group.num_rows] for group in self.groups],
        ]
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Read every row once and check every value.

        Raises:
            DataError, KeyRangeError, SchemaError: the first problem, with file, row group, column and row.
        """
        for group in self.groups:
            block = Block(self.schema, group.num_rows, 1)
            decode_group(self.files[group.file], self.stamps[group.file], group, self.schema, block, 0, 0)

    def head(self, num_rows: int = 5) -> Batch:
        """Return the first rows in the order of the files.

        Raises:
            ConfigError: fewer than one row is asked for.
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
        )
