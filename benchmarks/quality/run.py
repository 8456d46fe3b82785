"""AUC and log loss on real data, through the command line, over several seeds: `make quality`.

    python benchmarks/quality/run.py [--only ml1m] [--seeds 1] [--jobs 2] [--device cpu] [--keep FOLDER]

Early stopping sees the validation part alone, and a run reads the test part once, at its end. How the settings were
chosen, and where that was not free of the test part, stands in docs/lab-notes.md.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/record.py

from raw_data import DATA, DATA_SETS
from role_settings import ROLE_CASES
from settings import CASES, Case

from record import record


def viviane(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "viviane.cli.main", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
    return result.stdout


def prepare(case: Case, fold: int, folder: Path) -> Path:
    """Raw files and ETL, once per data set, fold and ETL settings."""
    etl = json.dumps(case.etl, indent=1)
    base = folder / f"{case.data}-{zlib.crc32(etl.encode())}-{fold}"
    if (base / "data" / "test").exists():
        return base / "data"
    raw = base / "raw"
    DATA_SETS[case.data](raw, *([fold] if case.folds > 1 else []))
    (base / "etl.json").write_text(etl)
    files = sorted(raw.iterdir())
    split = "file:" + ",".join(f"{part}={part}.*" for part in ("train", "valid", "test"))
    viviane("etl", *files, "--config", base / "etl.json", "--output", base / "data", "--split", split)
    return base / "data"


def train_once(case: Case, data: Path, seed: int, folder: Path, device: str) -> dict[str, float]:
    config = {
        **case.train,
        "name": case.train["model"].get("zoo", "model"),
        "data": {"train": str(data / "train"), "validation": str(data / "valid")},
        "solver": {**case.train["solver"], "seed": seed, "device": device},
    }
    folder.mkdir(parents=True)
    file = folder / "train.json"
    file.write_text(json.dumps(config, indent=1))
    viviane("train", file, "--run-folder", folder / "run")
    return json.loads(viviane("evaluate", folder / "run", data / "test", "--device", device, "--json"))


def run(case: Case, options: argparse.Namespace, folder: Path) -> None:
    start = time.perf_counter()
    seeds = list(case.seeds)[: options.seeds]
    data = [prepare(case, fold, folder) for fold in range(case.folds)]
    runs = folder / "runs" / re.sub(r"\W+", "-", case.name)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            (seed, fold): pool.submit(train_once, case, data[fold], seed, runs / f"{seed}-{fold}", options.device)
            for seed in seeds
            for fold in range(case.folds)
        }
        done = {key: future.result() for key, future in waiting.items()}
    aucs, losses = (
        [statistics.mean(done[seed, fold][metric] for fold in range(case.folds)) for seed in seeds]
        for metric in ("auc", "log_loss")
    )
    for seed, auc, loss in zip(seeds, aucs, losses, strict=True):
        print(f"{case.name}, seed {seed}: AUC {auc:.4f}, log loss {loss:.4f}", flush=True)
    print(f"{case.name}: {time.perf_counter() - start:.0f} s", flush=True)
    shape = {"seeds": len(seeds), "folds": case.folds, "device": options.device}
    figure = {"bench": "quality", "case": case.name, "shape": shape}
    record(
        **figure, metric="test AUC", value=statistics.mean(aucs), unit="", better="higher", goal=case.goal,
        spread=(min(aucs), max(aucs)),
    )  # fmt: skip
    record(
        **figure, metric="test log loss", value=statistics.mean(losses), unit="", better="lower",
        goal=case.goal_log_loss, spread=(min(losses), max(losses)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--keep", type=Path, help="work in this folder and keep it")
    options = parser.parse_args()
    if not DATA.is_dir() and options.keep is None:
        raise SystemExit(f"the data sets are not there: {DATA}\nset VIVIANE_DATA to the folder that holds them")
    with tempfile.TemporaryDirectory(prefix="viviane-quality-") as temporary:
        folder = options.keep or Path(temporary)
        for case in [*CASES, *ROLE_CASES]:
            if options.only in case.name:
                run(case, options, folder)


if __name__ == "__main__":
    main()
