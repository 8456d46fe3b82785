"""The ETL of etl.py as other libraries do it: a program each, run in a fresh interpreter as PROGRAM RAW OUT THREADS.

All read the same text, learn on the first 80% of the rows, and write three Parquet parts: label and numbers as float32
with fill 0 and ln(1 + x), categories seen 6 times or more as int32 ids by falling count, 1 missing, 2 unknown.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Peer(NamedTuple):
    """A library, the module that says whether it is there, and the program."""

    name: str
    module: str
    program: str


_NAMES: Final = """
import sys
from pathlib import Path
raw, out, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
dense = [f"I{i}" for i in range(1, 14)]
cats = [f"C{i}" for i in range(1, 27)]
names = ["label", *dense, *cats]
def parts(n):
    borders = [0, round(0.8 * n), round(0.9 * n), n]
    for part in ("train", "valid", "test"):
        (out / part).mkdir(parents=True)
    return borders, list(zip(("train", "valid", "test"), borders, borders[1:]))
"""

_PANDAS: Final = """
import numpy as np, pandas as pd
frame = pd.read_csv(raw, sep="\\t", header=None, names=names, dtype=dict.fromkeys(cats, str))
borders, pieces = parts(len(frame))
frame["label"] = frame["label"].astype("float32")
for name in dense:
    frame[name] = np.log1p(frame[name].fillna(0).clip(lower=0)).astype("float32")
for name in cats:
    counts = frame[name].iloc[: borders[1]].value_counts()
    counts = counts[counts >= 6].sort_index().sort_values(ascending=False, kind="stable")
    ids = pd.Series(np.arange(3, 3 + len(counts)), index=counts.index)
    missing = frame[name].isna()
    frame[name] = frame[name].map(ids).fillna(2).astype("int32").mask(missing, 1)
for part, start, end in pieces:
    frame.iloc[start:end].to_parquet(out / part / "part-00000.parquet", index=False)
"""

_POLARS: Final = """
import os
os.environ["POLARS_MAX_THREADS"] = str(threads)
import polars as pl
types = {"label": pl.Int32} | dict.fromkeys(dense, pl.Int64) | dict.fromkeys(cats, pl.String)
frame = pl.read_csv(raw, separator="\\t", has_header=False, schema=types)
borders, pieces = parts(len(frame))
head = frame.lazy().head(borders[1])
known = pl.collect_all([
    head.select(value=name).drop_nulls().group_by("value").len().filter(pl.col("len") >= 6)
    .sort(["len", "value"], descending=[True, False]).select("value").with_row_index("id", 3)
    for name in cats
])
ids = [
    pl.when(pl.col(name).is_null()).then(pl.lit(1, pl.Int32))
    .otherwise(pl.col(name).replace_strict(one["value"], one["id"], default=2, return_dtype=pl.Int32)).alias(name)
    for name, one in zip(cats, known)
]
numbers = [pl.col(name).fill_null(0).clip(lower_bound=0).log1p().cast(pl.Float32) for name in dense]
frame = frame.select(pl.col("label").cast(pl.Float32), *numbers, *ids)
for part, start, end in pieces:
    frame.slice(start, end - start).write_parquet(out / part / "part-00000.parquet")
"""

_PYARROW: Final = """
import pyarrow as pa, pyarrow.compute as pc, pyarrow.csv as csv, pyarrow.parquet as pq
pa.set_cpu_count(threads)
types = {"label": pa.int32()} | dict.fromkeys(dense, pa.int64()) | dict.fromkeys(cats, pa.string())
table = csv.read_csv(
    raw, csv.ReadOptions(column_names=names), csv.ParseOptions(delimiter="\\t"),
    csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
)
borders, pieces = parts(table.num_rows)
columns = {"label": table["label"].cast(pa.float32())}
for name in dense:
    columns[name] = pc.log1p(pc.max_element_wise(pc.fill_null(table[name], 0), 0).cast(pa.float64())).cast(pa.float32())
for name in cats:
    column = table[name]
    head = pa.table({"value": column.slice(0, borders[1]).drop_null()})
    counts = head.group_by("value").aggregate([("value", "count")])
    counts = counts.filter(pc.greater_equal(counts["value_count"], 6))
    known = counts.sort_by([("value_count", "descending"), ("value", "ascending")])["value"]
    ids = pc.add(pc.fill_null(pc.index_in(column, value_set=known), -1), 3)
    ids = pc.if_else(pc.is_null(column), 1, pc.if_else(pc.equal(ids, 2), 2, ids))
    columns[name] = ids.cast(pa.int32())
table = pa.table(columns)
for part, start, end in pieces:
    pq.write_table(table.slice(start, end - start), out / part / "part-00000.parquet")
"""

_SPARK: Final = """
from itertools import accumulate
from pyspark.sql import SparkSession, Window, functions as F
session = (
    SparkSession.builder.master(f"local[{threads}]")
    .config("spark.driver.memory", "4g").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .config("spark.local.dir", str(out.parent)).config("spark.sql.shuffle.partitions", str(4 * threads)).getOrCreate()
)
session.sparkContext.setLogLevel("ERROR")
schema = ", ".join(["label int", *(f"{n} bigint" for n in dense), *(f"{n} string" for n in cats)])
frame = session.read.csv(raw, sep="\\t", schema=schema).withColumn("at", F.monotonically_increasing_id())
frame = frame.withColumn("part", F.shiftright("at", 33)).persist()
sizes = {row["part"]: row["count"] for row in frame.groupBy("part").count().collect()}
starts = dict(zip(sorted(sizes), accumulate((sizes[part] for part in sorted(sizes)), initial=0)))
first = F.create_map(*(F.lit(number) for pair in starts.items() for number in pair))
frame = frame.withColumn("row", first[F.col("part")] + F.col("at").bitwiseAND((1 << 33) - 1)).drop("part", "at")
borders, pieces = parts(sum(sizes.values()))
train = frame.where(F.col("row") < borders[1])
for name in dense:
    x = F.greatest(F.coalesce(F.col(name), F.lit(0)), F.lit(0))
    frame = frame.withColumn(name, F.log1p(x).cast("float"))
frame = frame.withColumn("label", F.col("label").cast("float"))
pairs = ", ".join(f"'{name}', {name}" for name in cats)
values = train.selectExpr(f"stack({len(cats)}, {pairs}) as (name, value)").where("value is not null")
counts = values.groupBy("name", "value").count().where("count >= 6")
order = Window.partitionBy("name").orderBy(F.desc("count"), "value")
known = counts.select("name", "value", (F.row_number().over(order) + 2).alias("id")).persist()
for name in cats:
    one = known.where(F.col("name") == name).select(F.col("value").alias(name), F.col("id").alias(f"{name}_id"))
    frame = frame.join(F.broadcast(one), name, "left")
    ids = F.when(F.col(name).isNull(), 1).otherwise(F.coalesce(F.col(f"{name}_id"), F.lit(2))).cast("int")
    frame = frame.withColumn(name, ids).drop(f"{name}_id")
frame = frame.persist()
for part, start, end in pieces:
    rows = frame.where((F.col("row") >= start) & (F.col("row") < end)).select(*names)
    rows.write.mode("overwrite").parquet(str(out / part))
session.stop()
"""

PEERS: Final = (
    Peer("pandas", "pandas", _NAMES + _PANDAS),
    Peer("Polars", "polars", _NAMES + _POLARS),
    Peer("pyarrow", "pyarrow", _NAMES + _PYARROW),
    Peer("Spark", "pyspark", _NAMES + _SPARK),
)
