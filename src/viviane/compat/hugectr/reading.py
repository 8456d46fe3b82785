"""HugeCTR's readers: batches of a source, in the order of its files, once or repeatedly."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from viviane.batch import Batch
from viviane.compat.hugectr.argument_types import typed
from viviane.compat.hugectr.columns import Columns
from viviane.compat.hugectr.enums import Check_t, DataReaderType_t
from viviane.compat.hugectr.inputs import DataReaderParams
from viviane.compat.hugectr.listed_files import ListedNorm, ListedParquet, numbers_of
from viviane.compat.hugectr.processes import group
from viviane.compat.hugectr.raw_files import has_float_dense, is_of_2_0, rows_to_read
from viviane.compat.hugectr.sources import source_path
from viviane.core.errors import ConfigError, DataError
from viviane.data import Dataset, Reader
from viviane.data.formats import Format, RawAsyncFormat, RawFormat

_made: weakref.WeakSet[DataReader] = weakref.WeakSet()


class DataReader:
    """Yields batches of one source after the other.

    Args:
        params: type and options of the reader.
        columns: columns of the rows.
        batch_size: rows of a batch.
        repeat: restart at the end of the source.
        training: whether the rows are for training or evaluation.
        drop_last: skip a last batch that is shorter.
    """

    def __init__(
        self, params: DataReaderParams, columns: Columns, batch_size: int, *, repeat: bool, training: bool,
        drop_last: bool,
    ) -> None:  # fmt: skip
        self.params, self.columns, self.batch_size = params, columns, batch_size
        self.repeat, self.training, self.drop_last = repeat, training, drop_last
        self.source: str | None = None
        self._path = Path()
        self._data: Dataset | None = None
        self._reader: Reader | None = None
        self._batches: Iterator[Batch] | None = None
        self._at_end = False
        self._max_batches: int | None = None
        _made.add(self)
        if repeat:
            self.set_source(params.sources[0] if training else params.eval_source)

    @typed
    def set_source(self, file_name: str | list[str] | None = None) -> None:
        """Start reading a source; without one, or with "", restart the current one, initially the parameters'.

        Raises:
            ConfigError: there is no source, or several are given.
            DataError, SchemaError: the files do not match the reader's parameters.
        """
        source = file_name or None
        if isinstance(source, list):
            if len(source) != 1:
                raise ConfigError("a reader reads one source at a time", where="set_source", value=source)
            source = source[0]
        if source is None and self.source is None:  # HugeCTR's readers have the sources of DataReaderParams
            source = next(iter(self.params.sources), "") if self.training else self.params.eval_source
            if not source:
                raise ConfigError("no source has been set", where="set_source", fix="pass the path of a file list")
        if source is not None and source != self.source:
            path = source_path(source, self.params.data_reader_type, training=self.training)
            self.source, self._path = source, path
            given = format_of(self.params, self.columns, path)
            self._data = Dataset(path, self.columns.reader_schema(), format=given)
            self._max_batches = self._limit(given)
        self._batches = None
        self._begin()

    set_file_list_source = set_source
    """HugeCTR 2.3's name."""

    def start(self) -> None:
        """Restart at the beginning of the source."""
        self.set_source()

    def is_started(self) -> bool:
        """Return whether a source is set."""
        return self._batches is not None

    def is_eof(self) -> bool:
        """Return whether a source that is read once is at its end."""
        return self._at_end

    def next_batch(self) -> Batch | None:
        """Return the next batch, or None at the end of a source that is read once.

        Raises:
            ConfigError: no source is set.
        """
        if self._batches is None:
            raise ConfigError("the reader has no source", fix="call set_source on it, or train with repeat_dataset")
        batch = next(self._batches, None)
        if batch is None and self.repeat:
            self._begin()
            batch = next(self._batches, None)
        self._at_end = batch is None
        return None if batch is None else self.columns.shifted(batch)

    def every_batch(self, sources: Iterable[str]) -> Iterator[Batch]:
        """Yield the rows of some sources once, all of them on each process; the position of this reader is kept."""
        for source in sources:
            path = source_path(source, self.params.data_reader_type, training=self.training)
            data = Dataset(path, self.columns.reader_schema(), format=format_of(self.params, self.columns, path))
            with data.reader(self.batch_size, num_threads=1) as reader:
                for batch in reader:
                    yield self.columns.shifted(batch)

    def _begin(self) -> None:
        assert self._data is not None
        if not len(self._data):
            raise DataError("the source has no rows", where=self.source)
        drop = self.drop_last and (not self.repeat or len(self._data) >= self.batch_size)
        self.close()
        all_of_us = group()
        self._reader = self._data.reader(
            self.batch_size, drop_last=drop, rank=all_of_us.rank, num_ranks=all_of_us.size,
            max_batches=self._max_batches,
        )  # fmt: skip
        self._batches = iter(self._reader)
        self._at_end = False

    def close(self) -> None:
        """Stop the prefetching threads; the reader has no source until the next `set_source`."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._batches = None

    def _limit(self, given: Format) -> int | None:
        """Return the number of full batches in num_samples rows of a Raw file, None to read it completely."""
        if not isinstance(given, RawFormat | RawAsyncFormat):
            return None
        name = "num_samples" if self.training else "eval_num_samples"
        size = given.record(self.columns.reader_schema()).dtype.itemsize
        rows = rows_to_read(self._path, size, getattr(self.params, name), f"DataReaderParams, {name}")
        return None if rows is None else max(1, rows // self.batch_size)


class EarlyReader:
    """A reader before `Model.compile`: stores its source, and forwards to the model's reader afterwards."""

    def __init__(self) -> None:
        self._made: DataReader | None = None
        self._calls: list[str | list[str] | None] = []

    @typed
    def set_source(self, file_name: str | list[str] | None = None) -> None:
        """Set the source, see `DataReader.set_source`."""
        if self._made is None:
            self._calls.append(file_name)
        else:
            self._made.set_source(file_name)

    set_file_list_source = set_source

    def start(self) -> None:
        """Restart at the beginning of the source, see `DataReader.start`."""
        self.set_source()

    def is_started(self) -> bool:
        """Return whether a source is set."""
        return bool(self._calls) if self._made is None else self._made.is_started()

    def become(self, reader: DataReader) -> None:
        """Forward to the reader of the compiled model from now on."""
        self._made = reader
        for file_name in self._calls[-1:]:
            reader.set_source(file_name)
        self._calls = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._made is None:
            raise AttributeError(f"the data reader has no {name!r} before model.compile()")
        return getattr(self._made, name)


def format_of(params: DataReaderParams, columns: Columns, path: Path) -> Format:
    """Return the format of a reader's files.

    Args:
        params: type and options of the reader.
        columns: columns of the rows.
        path: path of the source; a RawAsync file determines the type of dense values if the script does not.
    """
    wide = columns.key_bytes == 8
    match params.data_reader_type:
        case DataReaderType_t.Norm:
            version: Literal["2.0", "2.1"] = "2.0" if is_of_2_0(path) else "2.1"
            checked = params.check_type is Check_t.Sum
            numbers = None if version == "2.0" else numbers_of(path, columns.reader_schema(), check_sum=checked)
            return ListedNorm(
                check_sum=checked, i64_input_key=wide, shifted_keys=False, version=version, numbers=numbers
            )
        case DataReaderType_t.Parquet:
            return ListedParquet(i64_input_key=wide)
        case DataReaderType_t.Raw:
            return RawFormat(float_label_dense=params.float_label_dense)
        case DataReaderType_t.RawAsync:
            is_float = None if params.async_param is None else params.async_param.has_float_dense
            if is_float is None:
                is_float = has_float_dense(path, columns.reader_schema(), wide=wide)
            return RawAsyncFormat(i64_input_key=wide, is_dense_float=is_float)
    raise ConfigError("unknown reader", where="DataReaderParams, data_reader_type", value=params.data_reader_type)


def open_readers() -> set[DataReader]:
    """Return the readers that exist now."""
    return set(_made)


def close_readers(but: Container[DataReader] = ()) -> None:
    """Stop the threads of all readers when a script has ended, but for those of the program that started it."""
    for reader in list(_made):
        if reader not in but:
            reader.close()
