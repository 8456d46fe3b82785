"""Spark as an engine of the ETL, on one machine or a cluster, with the output of DuckDB bit for bit.

What depends on one row alone is computed by DuckDB everywhere, in Spark's Python workers too, since engines differ in
the last bit of a logarithm and in how they write a number as text. Spark counts, sorts, groups and looks back, where
they agree. Sums of floats depend on their order: `run(in_order=True)` is DuckDB's, on the driver, as without Spark.

Workers need this package, and see input and output under the same paths: one machine, or a shared file system.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from viviane.core.errors import DataError, VivianeError
from viviane.core.optional import require
from viviane.etl.engine import Build, DuckDbEngine, Lookup, counted, ibis_schema

_LOCAL_SETTINGS: Final = {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1"}
_SETTINGS: Final = {"spark.sql.execution.arrow.maxRecordsPerBatch": "131072"}
_REQUIRED: Final = {"spark.sql.session.timeZone": "UTC", "spark.sql.caseSensitive": "true"}  # results depend on these
_WIDE: Final = pa.decimal128(20, 0)  # uint64, which Spark has not

T = TypeVar("T")
R = TypeVar("R")


class SparkEngine:
    """Runs expressions with Spark.

    Where a session is active already, its context is used, with settings of the engine's own; else one is started, and
    stopped with the engine.

    Args:
        master: such as "local[4]" or "spark://host:7077"; None: the active session or spark-defaults.
        settings: Spark's own, such as {"spark.plugins": "com.nvidia.spark.SQLPlugin"}.
        memory_limit_bytes: of the driver's heap, where this starts it, and as much again for DuckDB.
        threads, spill_folder: of DuckDB on the driver.

    Raises:
        MissingExtraError: without pyspark.
        DataError: Spark cannot be started, such as for want of Java.
    """

    def __init__(
        self,
        *,
        master: str | None = None,
        settings: Mapping[str, str] | None = None,
        memory_limit_bytes: int = 1 << 30,
        threads: int = 1,
        spill_folder: Path | None = None,
    ) -> None:
        sql = require("pyspark.sql", extra="spark", purpose="feature engineering with Spark")
        self._ibis = require("ibis", extra="spark", purpose="feature engineering with Spark")
        _ = self._ibis.pyspark  # registers the options its compiler reads
        self._local = DuckDbEngine(memory_limit_bytes=memory_limit_bytes, threads=threads, spill_folder=spill_folder)
        active = sql.SparkSession.getActiveSession()
        self._owned = active is None
        # A session of its own beside the active one, whose settings and views stay as they are.
        self._session = (
            _start(sql, master, settings or {}, memory_limit_bytes, spill_folder)
            if active is None
            else active.newSession()
        )
        for key, value in _REQUIRED.items():
            self._session.conf.set(key, value)
        self._views = 0

    def open(self, files: Sequence[Path], schema: pa.Schema) -> Any:
        """Return an ibis table over Parquet files of one schema."""
        self._guard(
            # A recursive look-up takes no column from a folder called date=2024-01-01.
            lambda: (
                self._session.read.option("recursiveFileLookup", "true")
                .parquet(*(re.sub(r"[]\\[{}*?\\\\]", r"\\\g<0>", _url(file)) for file in files))
                .createOrReplaceTempView("staged")
            )
        )
        return self._local.open(files, schema)

    def pick(self, rows: Any, names: Sequence[str], place: int = 0) -> Any:
        """Return an ibis table of some columns of another."""
        return rows.select(**{f"value{i}": rows[name] for i, name in enumerate(names)})

    def project(self, rows: Any, build: Build) -> Any:
        """Return an ibis table of columns that DuckDB computes from each row, in Spark's workers."""
        types = require("pyspark.sql.pandas.types", extra="spark", purpose="feature engineering with Spark")
        given = pa.schema(list(rows.schema().to_pyarrow()))
        made = rows.select(**build(rows)).schema().to_pyarrow()
        made = pa.schema([pa.field(field.name, field.type) for field in made])
        result = pa.schema([pa.field(f.name, _WIDE if f.type == pa.uint64() else f.type) for f in made])
        frame = self._guard(
            lambda: self._frame(rows).mapInArrow(_Rowwise(build, given, result), types.from_arrow_schema(result))
        )
        self._views += 1
        name = f"projected_{self._views}"
        frame.createOrReplaceTempView(name)
        return self._ibis.table(ibis_schema(made), name=name)

    def run(self, expression: Any, *, in_order: bool = False) -> pa.Table:
        """Run an ibis expression; in order means DuckDB on the driver, on one thread."""
        if in_order:
            return self._local.run(expression, in_order=True)
        table: pa.Table = self._guard(lambda: self._frame(expression).toArrow())
        fields = [pa.field(name, kind) for name, kind in _arrow_types(expression).items()]
        typed: pa.Table = table.cast(pa.schema(fields))
        return typed

    def count(
        self, values: Any, *, by_value: bool = False, min_count: int = 1, max_values: int | None = None
    ) -> pa.Table:
        """Count values with Spark."""
        return self.run(counted(values, by_value=by_value, min_count=min_count, max_values=max_values))

    def expect_expressions(self) -> None:
        """Nothing: ibis is loaded."""

    def lookup(self, known: Any) -> Lookup:
        """Return what finds places among known values, in the process that asks."""
        return self._local.lookup(known)

    def write(self, expression: Any, file: Path) -> None:
        """Run an ibis expression into one Parquet file, in its order."""
        folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", dir=file.parent))
        try:
            parts = folder / "parts"
            self._guard(lambda: self._frame(expression).write.parquet(_url(parts)))
            types = _arrow_types(expression)
            schema = pa.schema([pa.field(name, kind) for name, kind in types.items()])
            with pq.ParquetWriter(file, schema, compression="lz4") as writer:
                for part in sorted(parts.glob("part-*.parquet")):
                    for batch in pq.ParquetFile(part).iter_batches(batch_size=131_072):
                        writer.write_table(pa.Table.from_batches([batch]).cast(schema))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def evaluate(self, table: pa.Table, build: Build) -> pa.Table:
        """Compute columns from a table in memory, with DuckDB."""
        return self._local.evaluate(table, build)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """Yield work(item) in the order of items, done by Spark's workers, each item a task that Spark tries again."""
        items = list(items)
        if not items:
            return
        task, context = _Task(work), self._session.sparkContext
        for found, error in self._guard(lambda: context.parallelize(items, len(items)).map(task).collect()):
            if error is not None:
                raise error
            yield found

    def close(self) -> None:
        """Stop the session if it was started here."""
        self._local.close()
        if self._owned:
            self._session.stop()

    def _frame(self, expression: Any) -> Any:
        return self._session.sql(str(self._ibis.to_sql(expression, dialect="pyspark")))

    def _guard(self, work: Callable[[], Any]) -> Any:
        errors = require("pyspark.errors", extra="spark", purpose="feature engineering with Spark")
        java = require("py4j.protocol", extra="spark", purpose="feature engineering with Spark")
        try:
            return work()
        except (errors.PySparkException, java.Py4JError) as error:
            raise DataError(
                "Spark failed", value=_first_words(error),
                fix="read Spark's log for more; a task that ran out of memory needs more partitions or a larger heap",
            ) from error  # fmt: skip


class _Task:
    """Work whose errors about the data come back as they are: a second try would end the same."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __call__(self, item: Any) -> tuple[Any, VivianeError | None]:
        try:
            return self.work(item), None
        except VivianeError as error:
            return None, error


class _Rowwise:
    """What a Spark worker runs over its rows."""

    def __init__(self, build: Build, given: pa.Schema, result: pa.Schema) -> None:
        self.build, self.given, self.result = build, given, result

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = DuckDbEngine()
        try:
            for batch in batches:
                table = pa.Table.from_batches([batch]).cast(self.given)
                yield from engine.evaluate(table, self.build).cast(self.result).to_batches()
        finally:
            engine.close()


def _start(
    sql: Any, master: str | None, settings: Mapping[str, str], memory_limit_bytes: int, spill_folder: Path | None
) -> Any:
    builder = sql.SparkSession.builder.appName("viviane etl")
    wanted = dict(_SETTINGS)
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            wanted |= _LOCAL_SETTINGS | {"spark.driver.host": "127.0.0.1"}
            wanted["spark.driver.memory"] = f"{memory_limit_bytes >> 20}m"
            wanted["spark.sql.shuffle.partitions"] = "8"
            if spill_folder is not None:
                wanted["spark.local.dir"] = str(spill_folder)
    for key, value in (wanted | dict(settings)).items():
        builder = builder.config(key, value)
    try:
        with _workers_like_this(master):
            session = builder.getOrCreate()
    except Exception as error:  # pyspark raises a bare RuntimeError where Java is missing
        raise DataError(
            "Spark could not be started", where=f"master {master}", value=_first_words(error),
            fix="install Java 17 or later, and set JAVA_HOME; or correct the master",
        ) from error  # fmt: skip
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def _workers_like_this(master: str | None) -> Iterator[None]:
    """Let workers of this machine run the interpreter that runs this; Spark's choice would be any `python3`."""
    name = "PYSPARK_PYTHON"
    ours = name not in os.environ and (master or "").startswith("local")
    if ours:
        os.environ[name] = sys.executable
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


def _arrow_types(expression: Any) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in expression.schema().to_pyarrow()}


def _url(path: Path) -> str:
    return f"file://{path.resolve()}"  # Spark takes the text as it is: %3D would not become =


def _first_words(error: Exception) -> str:
    """The most informative line of an error: the last line of a worker's traceback, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    inner = [line for line in lines if "Error: " in line and not line.startswith("at ")]
    return (inner or lines)[-1 if inner else 0][:500]
