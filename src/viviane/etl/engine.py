"""The seam between what is computed and who computes it.

Operators, encodings, splits and filters are ibis expressions over an unbound table; an engine turns them into its own
language and runs them. DuckDB is the engine of one machine; a cluster engine has to offer these four methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from viviane.core.errors import DataError
from viviane.core.optional import require

Build: TypeAlias = Callable[[Any], Mapping[str, Any]]
"""From an ibis table to named column expressions."""

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

    def run(self, expression: Any, *, in_order: bool = False) -> pa.Table:
        """Run an ibis table expression; `in_order` reads rows in order, so that sums of floats repeat exactly."""

    def write(self, expression: Any, file: Path) -> None:
        """Run an ibis table expression into a Parquet file, in its order, without holding the result in memory."""

    def evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        """Compute columns from a table in memory, row by row, keeping the order of rows."""


def ibis_schema(schema: pa.Schema) -> dict[str, str]:
    """Return the ibis types of an Arrow schema."""
    types = {}
    for field in schema:
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        name = "timestamp" if pa.types.is_timestamp(inner) else _IBIS_TYPES[inner]
        types[field.name] = f"array<{name}>" if pa.types.is_list(field.type) else name
    return types


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
        duckdb = require("duckdb", extra="etl", purpose="feature engineering")
        self._ibis = require("ibis", extra="etl", purpose="feature engineering")
        self._error = duckdb.Error
        self.memory_limit_bytes, self.threads = memory_limit_bytes, threads
        settings = {
            "memory_limit": f"{memory_limit_bytes}B",
            "threads": str(threads),
            "preserve_insertion_order": "true",
        }
        if spill_folder is not None:
            settings["temp_directory"] = str(spill_folder)
        self._connection = duckdb.connect(":memory:", config={**settings, "python_enable_replacements": "false"})
        self._connection.execute("SET enable_progress_bar = false")
        self._plans: dict[Any, str] = {}

    def open(self, files: Sequence[Path], schema: pa.Schema) -> Any:
        """Return an ibis table over Parquet files of one schema."""
        names = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
        self._sql(f"CREATE OR REPLACE VIEW staged AS SELECT * FROM read_parquet([{names}])")
        return self._ibis.table(ibis_schema(schema), name="staged")

    def run(self, expression: Any, *, in_order: bool = False) -> pa.Table:
        """Run an ibis expression; in order means on one thread, which reads the files from front to back."""
        sql = str(self._ibis.to_sql(expression, dialect="duckdb"))
        if not in_order:
            return self._query(sql)
        self._sql("SET threads = 1")
        try:
            return self._query(sql)
        finally:
            self._sql(f"SET threads = {self.threads}")

    def write(self, expression: Any, file: Path) -> None:
        """Run an ibis expression into a Parquet file; the insertion order is that of ORDER BY."""
        sql = str(self._ibis.to_sql(expression, dialect="duckdb"))
        place = str(file).replace("'", "''")
        self._sql(f"COPY ({sql}) TO '{place}' (FORMAT parquet, COMPRESSION lz4)")

    def evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        """Compute columns from a table in memory; SELECT without join or grouping keeps DuckDB's insertion order."""
        key = (build, table.schema.remove_metadata())
        sql = self._plans.get(key)
        if sql is None:
            rows = self._ibis.table(ibis_schema(table.schema), name="rows")
            sql = str(self._ibis.to_sql(rows.select(**build(rows)), dialect="duckdb"))
            self._plans[key] = sql
        self._connection.register("rows", table)
        try:
            return self._query(sql)
        finally:
            self._connection.unregister("rows")

    def close(self) -> None:
        """Release memory and spill files."""
        self._connection.close()

    def _query(self, sql: str) -> pa.Table:
        try:
            table: pa.Table = self._connection.sql(sql).to_arrow_table()
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
