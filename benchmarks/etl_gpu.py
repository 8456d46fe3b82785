"""Count values and give them ids on a GPU, beside DuckDB and Polars on the same machine's cores.

    python benchmarks/etl_gpu.py [--small] [--rows N] [--columns N] [--peer duckdb] [--peer polars] [--device cuda]

Columns are whole numbers of 32 bits in 64, as Criteo's hexadecimal ids are, skewed, of the 26 sizes of etl.py. They
are resident before the clock starts: on the device as tensors, in DuckDB as a table in memory, in Polars as a frame.
Timed for every column: count its values, keep those seen 6 times or more in falling order, and give each row its id.

viviane's index, DuckDB's join and Polars' join give the same ids, which is checked by sums. "DuckDB and Arrow" is what
`engine="duckdb"` does: DuckDB counts, Arrow looks up, columns side by side on all threads. Peers that are not installed
are left out; to name one with --peer insists on it. --etl times a whole run of `viviane etl` with either engine too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from etl import SIZES, generate_apart
from record import record
from viviane.core.machine import usable_cores
from viviane.etl.device_counts import Counts, DeviceIndex, count_keys

LEAST = 6
FIRST_ID = 3
GOAL_TIMES_FASTER = 10.0
CHUNK = 1 << 20
PEERS = ("duckdb", "polars")
ENGINE = """
import sys
from viviane.etl import run
raw, out, engine, device = sys.argv[1:]
summary = run("criteo", raw, out, split="rows:train=0.8,valid=0.1,test=0.1", memory_limit="16GB", engine=engine,
              device=device or None)
print(" ".join(f"{step} {seconds:.2f}" for step, seconds in summary.seconds.items()))
"""


def column(size: int, rows: int, number: int, device: torch.device) -> Tensor:
    """Skewed keys of 32 bits, (rows,), int64; the same for the same arguments and kind of device."""
    random = torch.Generator(device).manual_seed(number)
    ranks = (size * torch.rand(rows, generator=random, device=device, dtype=torch.float64) ** 4).to(torch.int64)
    return (ranks.clamp_(max=size - 1) + 7919 * number) * 2_654_435_761 & 0xFFFFFFFF


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    wait(device)
    start = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - start, result


class Ours:
    """The device's way: sort to count, hash table to look up."""

    name = "viviane"

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self.columns, self.device = columns, columns[0].device

    def count(self, i: int) -> Counts:
        """The vocabulary of a column, in order of ids."""
        return count_keys(self.columns[i]).at_least(LEAST).ordered(by_value=False, unsigned=True)

    def map(self, i: int, vocabulary: Counts) -> Tensor:
        """Ids of all rows, int32."""
        return (DeviceIndex(vocabulary.keys).find(self.columns[i]) + FIRST_ID).to(torch.int32)

    def every(self) -> tuple[float, float, list[int]]:
        """Seconds of counting, of looking up, and the sums of the ids."""
        counting = mapping = 0.0
        sums = []
        for i in range(len(self.columns)):
            seconds, vocabulary = timed(lambda i=i: self.count(i), self.device)
            counting += seconds
            seconds, ids = timed(lambda i=i, known=vocabulary: self.map(i, known), self.device)
            mapping += seconds
            sums.append(int(ids.sum(dtype=torch.int64)))
        return counting, mapping, sums


def on_host(columns: Sequence[Tensor]) -> pa.Table:
    """The same columns as unsigned numbers in chunks, which DuckDB and Polars share out over threads."""
    arrays = {}
    for i, one in enumerate(columns):
        values = one.cpu().numpy().view(np.uint64)
        arrays[f"c{i}"] = pa.chunked_array(
            [pa.array(values[start : start + CHUNK]) for start in range(0, len(values), CHUNK)]
        )
    return pa.table(arrays)


def duckdb_ways(table: pa.Table, threads: int) -> dict[str, tuple[float, float, list[int]]]:
    """DuckDB alone, and the engine of today."""
    import duckdb

    connection = duckdb.connect(config={"threads": str(threads)})
    connection.register("arrow", table)
    connection.execute("CREATE TABLE rows AS SELECT * FROM arrow")
    counting = mapping = lookups = 0.0
    sums = []
    vocabularies = []
    for name in table.column_names:
        start = time.perf_counter()
        connection.execute(
            f"CREATE OR REPLACE TABLE known AS SELECT value, row_number() OVER () + {FIRST_ID - 1} AS id FROM "
            f"(SELECT {name} AS value, count(*) AS n FROM rows GROUP BY {name} HAVING n >= {LEAST} "
            "ORDER BY n DESC, value)"
        )
        counting += time.perf_counter() - start
        start = time.perf_counter()
        # A join keeps the order of the probing side while the insertion order is kept; the ids become a table.
        connection.execute(
            "CREATE OR REPLACE TABLE ids AS SELECT coalesce(id, 2)::INTEGER AS id "
            f"FROM rows LEFT JOIN known ON rows.{name} = known.value"
        )
        mapping += time.perf_counter() - start
        sums.append(int(connection.execute("SELECT sum(id) FROM ids").fetchall()[0][0]))
        vocabularies.append(connection.sql("SELECT value FROM known ORDER BY id").to_arrow_table().column(0))

    def look_up(name: str, known: Any) -> int:
        found = pc.fill_null(pc.index_in(table.column(name), value_set=known), -1)
        return int(pc.sum(found).as_py())

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(look_up, table.column_names, vocabularies))
    lookups = time.perf_counter() - start
    return {"DuckDB": (counting, mapping, sums), "DuckDB and Arrow": (counting, lookups, sums)}


def polars_ways(table: pa.Table, threads: int) -> dict[str, tuple[float, float, list[int]]]:
    """Polars: group and sort, then a left join that keeps the order."""
    os.environ["POLARS_MAX_THREADS"] = str(threads)  # read once, by the import
    import polars as pl

    if pl.thread_pool_size() != threads:
        raise SystemExit(f"Polars has {pl.thread_pool_size()} threads instead of {threads}")
    frame = pl.from_arrow(table)
    counting = mapping = 0.0
    sums = []
    for name in table.column_names:
        start = time.perf_counter()
        known = (
            frame.lazy().select(value=name).group_by("value").len().filter(pl.col("len") >= LEAST)
            .sort(["len", "value"], descending=[True, False]).select("value").with_row_index("id", FIRST_ID).collect()
        )  # fmt: skip
        counting += time.perf_counter() - start
        start = time.perf_counter()
        ids = (
            frame.lazy().select(value=name).join(known.lazy(), on="value", how="left", maintain_order="left")
            .select(pl.col("id").fill_null(2).cast(pl.Int32)).collect()
        )  # fmt: skip
        mapping += time.perf_counter() - start
        sums.append(int(ids["id"].cast(pl.Int64).sum()))
    return {"Polars": (counting, mapping, sums)}


def compare(rows: int, columns: int, peers: Sequence[str], device: torch.device, rounds: int) -> None:
    tensors = [column(size, rows, i, device) for i, size in enumerate(SIZES[:columns])]
    ours = Ours(tensors)
    ours.every()  # kernels are compiled, memory is taken
    runs = [ours.every() for _ in range(rounds)]
    counting, mapping, sums = min(runs, key=lambda one: one[0] + one[1])
    totals = sorted(one[0] + one[1] for one in runs)
    threads = usable_cores()  # a container's, not the machine's
    table = on_host(tensors)
    del tensors, ours
    found: dict[str, tuple[float, float, list[int]]] = {}
    for peer in peers:
        found |= {"duckdb": duckdb_ways, "polars": polars_ways}[peer](table, threads)
    shape = {"rows": rows, "columns": columns, "device": device.type, "threads": threads}
    for name, (peer_counting, peer_mapping, peer_sums) in found.items():
        if peer_sums != sums:
            raise SystemExit(f"viviane and {name} gave different ids")
        parts = {
            "count": (counting, peer_counting),
            "map": (mapping, peer_mapping),
            "count and map": (counting + mapping, peer_counting + peer_mapping),
        }
        for metric, (value, peer_value) in parts.items():
            whole = metric == "count and map"
            record(
                bench="etl_gpu", case=f"resident columns, beside {name}", metric=metric, value=value, unit="s",
                better="lower", peer=f"{name}, {threads} threads", peer_value=peer_value, shape=shape,
                goal=peer_value / GOAL_TIMES_FASTER if whole else None,
                spread=(totals[0], totals[-1]) if whole else None,
            )  # fmt: skip
    if not found:
        print(f"no peer: count {counting:.3f} s, map {mapping:.3f} s")


def whole(folder: Path, rows: int, device: torch.device) -> None:
    """Text to Parquet with either engine; output compared."""
    generate_apart(folder / "raw.tsv", rows)
    seconds = {}
    for engine, on in (("duckdb", ""), ("gpu", device.type)):
        start = time.perf_counter()
        arguments = [str(folder / "raw.tsv"), str(folder / engine), engine, on]
        print(
            engine, subprocess.run([sys.executable, "-c", ENGINE, *arguments], check=True, text=True, stdout=-1).stdout
        )
        seconds[engine] = time.perf_counter() - start
    for file in sorted((folder / "duckdb").rglob("*.parquet")):
        if file.read_bytes() != (folder / "gpu" / file.relative_to(folder / "duckdb")).read_bytes():
            raise SystemExit(f"the engines wrote different bytes: {file.name}")
    record(
        bench="etl_gpu", case="criteo text to Parquet", metric="time", value=seconds["gpu"], unit="s", better="lower",
        peer='engine="duckdb"', peer_value=seconds["duckdb"], shape={"rows": rows, "device": device.type},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="few rows: shows that it runs, keeps no figures")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", choices=PEERS, action="append", help="default: those that are installed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--etl", type=int, metavar="ROWS", help="time `viviane etl` of so many rows of text too")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    peers = arguments.peer or [name for name in PEERS if importlib.util.find_spec(name)]
    rows = arguments.rows or (200_000 if arguments.small else 50_000_000)
    compare(rows, arguments.columns, peers, device, 1 if arguments.small else arguments.rounds)
    if arguments.etl:
        folder = Path(tempfile.mkdtemp(prefix="viviane-bench-etl-"))
        try:
            whole(folder, arguments.etl, device)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
