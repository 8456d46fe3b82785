"""What tables and layers of 8 bits cost and save: AUC on real clicks, memory, and time of a session on one CPU thread.

    python benchmarks/serving_int8.py [--small] [--data FOLDER]

AUC: DLRM is trained on clicks of Criteo's display ads (80,000 rows, where the folder has them; the data are not part
of this project) and asked for the test rows in float32, with 8-bit tables, 8-bit layers, and both. Time: rounds
alternate between the two sessions; tables are larger than the processor's caches, and layers those of NVIDIA's DLRM.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.metrics import roc_auc_score

import viviane as vv
from record import record
from viviane.batch import Batch, Layout
from viviane.ops.linear.cpu_int8 import reason_against_int8
from viviane.serving import InferenceSession

SMALL = "--small" in sys.argv
HAS_LAYERS = reason_against_int8() is None
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SEEDS = 1 if SMALL else 3
KINDS = {
    "tables": {"table_dtype": "int8"},
    "layers": {"layer_dtype": "int8"},
    "tables and layers": {"table_dtype": "int8", "layer_dtype": "int8"},
}


def clicks(file: Path) -> tuple[vv.Schema, dict[str, dict[str, np.ndarray]]]:
    """Columns of the train, valid and test parts: numbers as log(1 + x), ids of values that train has twice or more."""
    table = pq.read_table(file)
    place = np.array([zlib.crc32(str(row).encode()) % 10 for row in range(table.num_rows)])
    parts = {"train": place > 2, "valid": place == 2, "test": place < 2}
    columns = {"label": table["label"].to_numpy().astype("float32")}
    for n in range(1, 14):
        numbers = table[f"i{n}"].to_numpy().astype("float64")
        columns[f"i{n}"] = np.log1p(np.maximum(np.nan_to_num(numbers), 0)).astype("float32")
    sizes = {}
    for n in range(1, 27):
        values = np.nan_to_num(table[f"c{n}"].to_numpy().astype("float64"), nan=-1).astype("int64")
        known, counts = np.unique(values[parts["train"]], return_counts=True)
        known = known[counts > 1]
        at = np.clip(np.searchsorted(known, values), 0, len(known) - 1)
        columns[f"c{n}"] = np.where(known[at] == values, at + 3, 2).astype("int32")  # 2: unknown
        sizes[f"c{n}"] = len(known) + 3
    schema = vv.Schema(
        labels=[{"name": "label"}],
        dense=[{"name": f"i{n}"} for n in range(1, 14)],
        categorical=[{"name": name, "num_ids": size} for name, size in sizes.items()],
    )
    return schema, {name: {k: v[mask] for k, v in columns.items()} for name, mask in parts.items()}


def quality(file: Path) -> None:
    schema, parts = clicks(file)
    kinds = {"": {}, **{kind: settings for kind, settings in KINDS.items() if "layers" not in kind or HAS_LAYERS}}
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds if kind}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = {part: vv.write_dataset(folder / part, schema, [rows]) for part, rows in parts.items()}
        for seed in range(SEEDS):
            solver = vv.Solver(
                batch_size=512,
                lr=1e-3,
                epochs=1 if SMALL else 6,
                patience=1,
                restore_best=True,
                seed=seed,
                device="cpu",
            )
            model = vv.Model(solver, schema)
            model.add(vv.zoo.DLRM(dim=16, bottom_mlp=[128, 64, 16], top_mlp=[256, 128]))
            model.compile(vv.Adam())
            model.fit(sets["train"], sets["valid"])
            path = model.save(folder / f"model{seed}")
            scores = {}
            for kind, settings in kinds.items():
                with InferenceSession(path, device="cpu", **settings) as session:
                    scores[kind] = session.predict(parts["test"])
            auc = {kind: roc_auc_score(parts["test"]["label"], one) for kind, one in scores.items()}
            for kind, differences in found.items():
                moved = float(np.abs(scores[kind] - scores[""]).max())
                print(f"seed {seed}: AUC {auc['']:.6f}, with 8-bit {kind} {auc[kind]:.6f}, largest move {moved:.1e}")
                differences.append((auc[kind] - auc[""], auc[""], moved))
    shape = {"rows": len(parts["test"]["label"]), "seeds": SEEDS, "dim": 16}
    for kind, differences in found.items():
        worst = max(abs(one[0]) for one in differences)
        case, exact = f"DLRM with 8-bit {kind}, Criteo clicks, test part", [one[1] for one in differences]
        record(bench="serving_int8", case=case, metric="AUC, largest difference to float32", value=worst, unit="",
               better="lower", goal=1e-3, peer="float32, AUC", peer_value=statistics.mean(exact),
               shape=shape)  # fmt: skip
        record(bench="serving_int8", case=case, metric="probability, largest difference to float32",
               value=max(one[2] for one in differences), unit="", better="lower", shape=shape)  # fmt: skip


def layers() -> None:
    """Time NVIDIA's one-hot DLRM with layers of 8 bits beside float32."""
    if not HAS_LAYERS:
        print(f"no layers of 8 bits: {reason_against_int8()}")
        return
    tables, rows, dim = 26, 1000, 128
    schema = vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": f"x{i}"} for i in range(13)],
        categorical=[{"name": f"c{i}", "num_ids": rows} for i in range(tables)],
    )
    with tempfile.TemporaryDirectory() as folder:
        model = vv.Model(vv.Solver(device="cpu", num_threads=1), schema)
        model.add(vv.zoo.DLRM(dim=dim, bottom_mlp=[512, 256, dim], top_mlp=[1024, 1024, 512, 256]))
        model.compile(vv.SGD())
        path = model.save(Path(folder) / "model")
        sessions = {kind: InferenceSession(path, device="cpu", layer_dtype=kind) for kind in ("model", "int8")}
        compare(sessions, schema, rows, "layers: DLRM 512-256-128, 1024-1024-512-256", {"tables": tables, "dim": dim})


def speed(dim: int) -> None:
    tables, rows = 26, 20_000 if SMALL else 200_000
    schema = vv.Schema(
        labels=[{"name": "y"}],
        dense=[{"name": f"x{i}"} for i in range(13)],
        categorical=[{"name": f"c{i}", "num_ids": rows} for i in range(tables)],
    )
    with tempfile.TemporaryDirectory() as folder:
        model = vv.Model(vv.Solver(device="cpu", num_threads=1), schema)
        model.add(vv.zoo.DLRM(dim=dim, bottom_mlp=[64, dim], top_mlp=[64]))
        model.compile(vv.SGD())
        path = model.save(Path(folder) / "model")
        del model
        sessions = {kind: InferenceSession(path, device="cpu", table_dtype=kind) for kind in ("model", "int8")}
        shape = {"tables": tables, "rows": rows, "dim": dim}
        record(bench="serving_int8", case=f"tables, dim {dim}", metric="memory", unit="MiB", better="lower",
               value=sessions["int8"].table_bytes / 2**20, peer="float32 tables, MiB",
               peer_value=sessions["model"].table_bytes / 2**20, shape=shape)  # fmt: skip
        compare(sessions, schema, rows, f"tables: DLRM, dim {dim}", shape)


def compare(
    sessions: dict[str, InferenceSession], schema: vv.Schema, rows: int, case: str, shape: dict[str, object]
) -> None:
    """Record how many times as fast the session "int8" is as the session "model"; both are closed."""
    generator = torch.Generator().manual_seed(1)
    tables = len(schema.categorical)
    for size in (1, 64, 1024):
        batches = [
            Batch(Layout.of(schema), torch.zeros(size, 0), torch.rand(size, 13, generator=generator),
                  torch.randint(3, rows, (size, tables), generator=generator, dtype=torch.int32))
            for _ in range(32 if size < 1024 else 8)  # other rows each time, so that they come from memory
        ]  # fmt: skip
        times: dict[str, list[float]] = {kind: [] for kind in sessions}
        for number in range(5 if SMALL else 25):
            for kind, session in sessions.items():
                start = time.process_time()
                for batch in batches * (8 if size == 1 else 1):
                    session.predict(batch)
                if number:
                    times[kind].append((time.process_time() - start) / len(batches) / (8 if size == 1 else 1) * 1e6)
        ratios = [a / b for a, b in zip(times["model"], times["int8"], strict=True)]
        quantiles = statistics.quantiles(ratios, n=5)
        record(bench="serving_int8", case=f"{case}, batch {size}", metric="times as fast as float32",
               value=statistics.median(ratios), unit="x", better="higher", spread=(quantiles[0], quantiles[3]),
               peer="float32, us a request", peer_value=statistics.median(times["model"]),
               shape={**shape, "microseconds": round(statistics.median(times["int8"]), 1)})  # fmt: skip
    for session in sessions.values():
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="less data and short rounds; nothing is recorded")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the real data sets")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = options.data / "criteo_tb_80k" / "criteo_tb_80k.parquet"
    if file.exists():
        quality(file)
    else:
        print(f"no AUC: {file} does not exist")
    for dim in (16, 128):
        speed(dim)
    layers()


if __name__ == "__main__":
    main()
