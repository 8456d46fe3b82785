"""AUC and log loss on real data, through the command line, over several seeds: `make quality`.

    python benchmarks/quality/run.py [--only ml1m] [--seeds 1] [--jobs 2] [--device cpu] [--keep FOLDER]

Early stopping sees the validation part alone, and a run reads the test part once, at its end. How the settings were
chosen, and where that was not free of the test part, stands in docs/lab-notes.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/record.py

import ranked
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
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "train.json", json.dumps(config, indent=1)
    done = (folder / "run" / "model").exists() and file.read_text() == text  # by an earlier call with --keep
    if not done:
        shutil.rmtree(folder / "run", ignore_errors=True)
        file.write_text(text)
        viviane("train", file, "--run-folder", folder / "run")
    return json.loads(viviane("evaluate", folder / "run", data / "test", "--device", device, "--json"))


Results = dict[tuple[str, int], dict[str, float]]
"""Test figures by case and seed, means over folds."""


def run(case: Case, options: argparse.Namespace, folder: Path, results: Results) -> None:
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
    for seed in seeds:
        folds = [done[seed, fold] for fold in range(case.folds)]
        results[case.name, seed] = found = {name: statistics.mean(one[name] for one in folds) for name in folds[0]}
        figures = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if name.startswith(("auc", "log")))
        print(f"{case.name}, seed {seed}: {figures}", flush=True)
    print(f"{case.name}: {time.perf_counter() - start:.0f} s", flush=True)
    show(case, seeds, results, {"seeds": len(seeds), "folds": case.folds, "device": options.device})


def show(case: Case, seeds: list[int], results: Results, shape: dict[str, object]) -> None:
    """Record AUC and log loss, or the AUC of each label and their sum."""
    figure = {"bench": "quality", "case": case.name, "shape": shape, "unit": ""}

    def keep(metric: str, values: list[float], **more: object) -> None:
        record(**figure, metric=metric, value=statistics.mean(values), spread=(min(values), max(values)), **more)  # type: ignore[arg-type]

    def beside(metric: str, label: str = "") -> dict[str, object]:
        """What another case, run before, has for the same label."""
        other = case.beside.get(label, "")
        if (other, seeds[-1]) not in results:
            return {}
        name = metric if metric in results[other, seeds[-1]] else "auc"
        return {"peer": other, "peer_value": statistics.mean(results[other, seed][name] for seed in seeds)}

    found = [results[case.name, seed] for seed in seeds]
    labels = [name.removeprefix("auc/") for name in found[0] if name.startswith("auc/")]
    peers = {label: beside(f"auc/{label}", label) for label in labels}
    for label in labels:
        values = [one[f"auc/{label}"] for one in found]
        more = {"goal": case.label_goals.get(label), "peer_published": case.published.get(label)}
        keep(f"test AUC, {label}", values, better="higher", **more, **peers[label])
    if labels:
        known = [float(str(peers[label]["peer_value"])) for label in labels if peers[label]]
        both = {"peer": "models of one label", "peer_value": sum(known)} if len(known) == len(labels) else {}
        sums = [sum(one[f"auc/{label}"] for label in labels) for one in found]
        keep("test AUC, sum of the labels", sums, better="higher", goal=both.get("peer_value"), **both)
    else:
        more = {"goal": case.goal, "peer_published": case.published.get("")}
        keep("test AUC", [one["auc"] for one in found], better="higher", **more, **beside("auc"))
        keep("test log loss", [one["log_loss"] for one in found], better="lower", goal=case.goal_log_loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this; several: this|that")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--keep", type=Path, help="work in this folder, and keep what is trained for a later call")
    options = parser.parse_args()
    if not DATA.is_dir() and options.keep is None:
        raise SystemExit(f"the data sets are not there: {DATA}\nset VIVIANE_DATA to the folder that holds them")
    with tempfile.TemporaryDirectory(prefix="viviane-quality-") as temporary:
        folder = options.keep or Path(temporary)
        results: Results = {}
        for case in [*CASES, *ROLE_CASES]:
            if any(part in case.name for part in options.only.split("|")):
                run(case, options, folder, results)
        for name in ranked.RANKED:
            if any(part in name for part in options.only.split("|")):
                ranked.run(name, range(1, options.seeds + 1), options.jobs, options.device)


if __name__ == "__main__":
    main()
