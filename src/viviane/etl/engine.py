"""The seam between what is computed and who computes it.

Operators, encodings, splits and filters are ibis expressions over an unbound table; an engine turns them into its own
language and runs them. DuckDB is the engine of one machine, `viviane.etl.spark` that of a cluster; `viviane.etl.gpu`
counts and looks values up on a GPU.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from viviane.core.errors import DataError
from viviane.core.optional import require
from viviane.etl.arrays import numbers_of, scalar_of
from viviane.etl.sql_names import quoted, sql_name, with_sql_names

Build: TypeAlias = Callable[[Any], Mapping[str, Any]]
"""From an ibis table to named column expressions."""

Lookup: TypeAlias = Callable[[Any], NDArray[np.integer[Any]]]
"""From an Arrow array to the place of each value among known ones; -1 where it is missing or none of them."""

_IBIS_TYPES: Final = {
    pa.float64(): "float64",
    pa.float32(): "float32",
    pa.int64(): "int64",
    pa.uint64(): "uint64",
    pa.string(): "string",
}


class Engine(Protocol):
    """What the ETL asks of an engine."""

    def open(self, files: Sequence[Path], schema: pa.Schema) -> Any:
        """Return an ibis table over Parquet files of one schema, in their order."""

    def pick(self, rows: Any, names: Sequence[str], place: int = 0) -> Any:
        """Return an ibis table of some columns of another as value0, value1, ..., the same for all of the same types.

        Queries over such tables differ in nothing, so that an engine plans them once for many columns.

        Args:
            place: tables of different places may be at work together; a place holds the last one that was picked.
        """

    def project(self, rows: Any, build: Build) -> Any:
        """Return an ibis table of columns computed from each row of another; same bits on every engine."""

    def run(self, expression: Any, *, in_order: bool = False) -> pa.Table:
        """Run an ibis table expression; `in_order` reads rows in order, so that sums of floats repeat exactly."""

    def write(self, expression: Any, file: Path) -> None:
        """Run an ibis table expression into a Parquet file, in its order, without holding the result in memory."""

    def count(
        self, values: Any, *, by_value: bool = False, min_count: int = 1, max_values: int | None = None
    ) -> pa.Table:
        """Count the values of an ibis table's only column, `value`, none of which is missing.

        Args:
            by_value: in rising order of values, else by falling count, equal counts by value.
            min_count: values seen less often are left out.
            max_values: only the first this many.

        Returns:
            `value` and `count` (int64).
        """

    def lookup(self, known: Any) -> Lookup:
        """Return what finds places among an Arrow array of distinct values; several threads may call it."""

    def evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        """Compute columns from a table in memory, row by row, keeping their order; several threads may call it."""

    def expect_expressions(self) -> None:
        """Get ready for expressions while other work is done; without it the first one waits."""

    def close(self) -> None:
        """Release what it holds."""


def ibis_schema(schema: pa.Schema) -> dict[str, str]:
    """Return the ibis types of an Arrow schema."""
    types = {}
    for field in schema:
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        name = "timestamp" if pa.types.is_timestamp(inner) else _IBIS_TYPES[inner]
        types[field.name] = f"array<{name}>" if pa.types.is_list(field.type) else name
    return types


def counted(values: Any, *, by_value: bool, min_count: int, max_values: int | None) -> Any:
    """Return what `Engine.count` asks for as an ibis expression."""
    import ibis

    counts = values.group_by("value").aggregate(count=values.count())
    if min_count > 1:
        counts = counts.filter(counts["count"] >= min_count)
    counts = counts.order_by("value" if by_value else [ibis.desc("count"), "value"])
    return counts if max_values is None else counts.limit(max_values)


@cache
def _loading_ibis() -> Thread:
    """Start to load ibis and its compiler once; this takes longer than reading a small input, so both run at once."""
    thread = Thread(target=_load_ibis, name="loading ibis")
    thread.start()
    return thread


def _load_ibis() -> None:
    with suppress(Exception):  # who needs it meets the error again
        ibis = importlib.import_module("ibis")
        ibis.to_sql(ibis.table({"x": "int64"}, name="t"), dialect="duckdb")


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _with_sql_names(table: pa.Table) -> pa.Table:
    return table.rename_columns([sql_name(name) for name in table.column_names])


def _index_in(known: Any, values: Any) -> NDArray[np.integer[Any]]:
    places = pc.index_in(values, value_set=known)
    return numbers_of(pc.fill_null(places, scalar_of(-1, places.type)))


class DuckDbEngine:
    """Runs expressions with DuckDB, out of core: past `memory_limit` it spills into `spill_folder`.

    Example:
        >>> engine = DuckDbEngine()
        >>> engine.evaluate(pa.table({"x": [1.0, 2.0]}), lambda t: {"y": t.x * 2}).to_pydict()
        {'y': [2.0, 4.0]}
    """

    def __init__(
        self, *, memory_limit_bytes: int = 1 << 30, threads: int = 1, spill_folder: Path | None = None
    ) -> None:
        for name in ("duckdb", "ibis"):  # fail before the long work begins
            if importlib.util.find_spec(name) is None:
                require(name, extra="etl", purpose="feature engineering")
        self.memory_limit_bytes, self.threads = memory_limit_bytes, threads
        self.spill_folder = spill_folder
        self._plans: dict[Any, tuple[str, list[str]]] = {}
        self._texts: dict[Any, str] = {}
        self._one_at_a_time = Lock()

    @cached_property
    def _connection(self) -> Any:
        """The database, opened by the first query: a small input of plain columns needs none."""
        duckdb = require("duckdb", extra="etl", purpose="feature engineering")
        settings = {
            "memory_limit": f"{self.memory_limit_bytes}B",
            "threads": str(self.threads),
            "preserve_insertion_order": "true",
        }
        if self.spill_folder is not None:
            settings["temp_directory"] = str(self.spill_folder)
        connection = duckdb.connect(":memory:", config={**settings, "python_enable_replacements": "false"})
        # In a notebook without ipywidgets DuckDB has no bar, and refuses to be told so.
        with suppress(duckdb.InvalidInputException):
            connection.execute("SET enable_progress_bar = false")
        return connection

    @property
    def _error(self) -> type[Exception]:
        error: type[Exception] = require("duckdb", extra="etl", purpose="feature engineering").Error
        return error

    @property
    def _ibis(self) -> Any:
        _loading_ibis().join()
        return require("ibis", extra="etl", purpose="feature engineering")

    def open(self, files: Sequence[Path], schema: pa.Schema) -> Any:
        """Return an ibis table over Parquet files of one schema."""
        places = ", ".join(_literal(re.sub(r"[*?[]", r"[\g<0>]", str(file))) for file in files)
        columns = ", ".join(quoted(name) for name in schema.names)
        # Columns are named by position. A path is neither a pattern nor, like date=2024-01-01, a column.
        self._sql(
            "CREATE OR REPLACE VIEW staged AS "
            f"SELECT * FROM read_parquet([{places}], hive_partitioning = false) AS files({columns})"
        )
        return self._ibis.table(ibis_schema(schema), name="staged")

    @contextmanager
    def held(self, table: pa.Table) -> Iterator[Any]:
        """Make rows in memory an ibis table, for as long as the block runs."""
        self._connection.register("held", _with_sql_names(table))
        try:
            yield self._ibis.table(ibis_schema(table.schema), name="held")
        finally:
            self._connection.unregister("held")

    def pick(self, rows: Any, names: Sequence[str], place: int = 0) -> Any:
        """Return an ibis table of some columns of another, which is a view in DuckDB."""
        kinds, view = rows.schema(), f"picked{place}"
        columns = ", ".join(f"{quoted(name)} AS value{i}" for i, name in enumerate(names))
        self._sql(f"CREATE OR REPLACE TEMP VIEW {view} AS SELECT {columns} FROM ({self._text(rows)})")
        return self._ibis.table({f"value{i}": kinds[name] for i, name in enumerate(names)}, name=view)

    def project(self, rows: Any, build: Build) -> Any:
        """Return an ibis table of columns computed from each row of another."""
        return rows.select(**build(rows))

    def run(self, expression: Any, *, in_order: bool = False) -> pa.Table:
        """Run an ibis expression; in order means on one thread, which reads the files from front to back."""
        sql = self._text(expression)
        names = list(expression.columns)
        if not in_order:
            return self._query(sql, names)
        self._sql("SET threads = 1")
        try:
            return self._query(sql, names)
        finally:
            self._sql(f"SET threads = {self.threads}")

    def count(
        self, values: Any, *, by_value: bool = False, min_count: int = 1, max_values: int | None = None
    ) -> pa.Table:
        """Count values, out of core."""
        return self.run(counted(values, by_value=by_value, min_count=min_count, max_values=max_values))

    def lookup(self, known: Any) -> Lookup:
        """Return what finds places among known values, with Arrow, which hashes the known ones at each call."""
        return partial(_index_in, known)

    def write(self, expression: Any, file: Path) -> None:
        """Run an ibis expression into a Parquet file; the insertion order is that of ORDER BY."""
        assert all(sql_name(name) == name for name in expression.columns)  # the file has the names of the SQL
        self._sql(f"COPY ({self._text(expression)}) TO {_literal(str(file))} (FORMAT parquet, COMPRESSION lz4)")

    def evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        """Compute columns from a table in memory; SELECT without join or grouping keeps DuckDB's insertion order."""
        key = (build, table.schema.remove_metadata())
        plan = self._plans.get(key)
        if plan is None:
            rows = self._ibis.table(ibis_schema(table.schema), name="rows")
            made = rows.select(**build(rows))
            plan = self._plans[key] = self._text(made), list(made.columns)
        with self._one_at_a_time:  # the connection is one, and so is the name
            self._connection.register("rows", _with_sql_names(table))
            try:
                return self._query(*plan)
            finally:
                self._connection.unregister("rows")

    def expect_expressions(self) -> None:
        """Load ibis beside what comes next, which takes as long as reading a small input."""
        _loading_ibis()

    def close(self) -> None:
        """Release memory and spill files."""
        if "_connection" in self.__dict__:
            self._connection.close()

    def _text(self, expression: Any) -> str:
        """An ibis expression as SQL: put into words once, however often an equal one is built."""
        key = expression.op()
        if key not in self._texts:
            self._texts[key] = with_sql_names(str(self._ibis.to_sql(expression, dialect="duckdb")))
        return self._texts[key]

    def _query(self, sql: str, names: list[str]) -> pa.Table:
        try:
            table: pa.Table = self._connection.sql(sql).to_arrow_table().rename_columns(names)
            return table
        except self._error as error:
            raise self._explain(error) from error

    def _sql(self, sql: str) -> None:
        try:
            self._connection.execute(sql)
        except self._error as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> DataError:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if "Out of Memory" in str(error):
            fix = f"raise the memory limit (DuckDB's share is {self.memory_limit_bytes >> 20} MiB) or free disk space"
            return DataError("the engine ran out of memory", value=first, fix=fix)
        return DataError("the engine failed", value=first, fix="free disk space if it is full, then run again")
