"""The whole road, by the real commands: generate, clean, train, evaluate, export, predict, look.

Every step is a `viviane` command that is printed before it runs, so that each can be copied and run alone.
Run it with `make demo`, or: python examples/demo.py --folder demo
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from viviane.cli.main import main as command_line

# A value of 8 hexadecimal digits that the generator never writes: an id that nobody has seen.
UNSEEN = "feedbeef"
ROWS = 2_000_000
FIRST_CATEGORY = 14  # a line is: label, 13 numbers, 26 categories


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the demo from raw logs to a report.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where everything is written")
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows")
    arguments = parser.parse_args()
    folder = arguments.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.perf_counter()
    if arguments.rows == ROWS:
        print("It takes 1 to 3 minutes on two cores, and 1 GB of disk. Progress is a line every ten seconds, or a bar.")

    step("1. Generate click logs in Criteo's text format; the best AUC that any model can reach on them is known")
    valid_rows = max(arguments.rows // 10, 1000)
    viviane("generate", folder / "raw", "--format", "criteo", "--rows", arguments.rows, "--valid-rows", valid_rows)

    step("2. Clean them: fill gaps, take logarithms, turn categories into ids by frequency; fit on the training rows")
    raw = [folder / "raw" / "train.txt", folder / "raw" / "valid.txt"]
    split = "file:train=train.txt,valid=valid.txt"
    viviane("etl", *raw, "--preset", "criteo", "--output", folder / "data", "--split", split)

    step("3. Train DCN v2")
    config = folder / "config.json"
    config.write_text(json.dumps(settings(folder), indent=2) + "\n")
    print(f"{config}:\n{config.read_text()}")
    viviane("train", config)

    step("4. Evaluate what training exported: a folder with graph, schema, weights and the fitted ETL")
    viviane("evaluate", folder / "run" / "model", folder / "data" / "valid")
    planted = json.loads((folder / "raw" / "valid.txt.info.json").read_text())
    print(f"no model can do better here than AUC {planted['best_auc']:.4f}, log loss {planted['best_log_loss']:.4f}")

    step("5. Predict on raw rows, some with ids that were never seen: they become id 2, unknown, and get a score too")
    num_rows = write_new_rows(folder / "raw" / "valid.txt", folder / "new_rows.txt")
    viviane("predict", folder / "run" / "model", folder / "new_rows.txt", "--output", folder / "scores.parquet")
    show_scores(folder / "scores.parquet", num_rows)

    report = (folder / "run" / "report.html").resolve()
    print(f"\nDone in {time.perf_counter() - start:.0f} s. Look at the report: {report}")


def settings(folder: Path) -> dict[str, object]:
    """Return what `viviane train` reads: all paths, sizes and rates of the run."""
    return {
        "name": "demo",
        "data": {"train": str(folder / "data" / "train"), "validation": str(folder / "data" / "valid")},
        "solver": {"batch_size": 2048, "lr": 0.001, "epochs": 1, "eval_every": 250, "device": "cpu"},
        "optimizer": {"type": "adam"},
        "model": {"zoo": "dcn_v2", "dim": 16, "num_cross_layers": 2, "deep_mlp": [128, 64]},
        "metrics": ["auc", "log_loss"],
        "run_folder": str(folder / "run"),
    }


def write_new_rows(source: Path, target: Path, num_rows: int = 1000) -> int:
    """Copy the first rows; every other one gets a category value that the training rows do not hold."""
    lines = []
    with source.open() as file:
        for number, line in zip(range(num_rows), file, strict=False):
            cells = line.rstrip("\n").split("\t")
            if number % 2:
                cells[FIRST_CATEGORY:] = [UNSEEN] * len(cells[FIRST_CATEGORY:])
            lines.append("\t".join(cells))
    target.write_text("\n".join(lines) + "\n")
    return len(lines)


def show_scores(path: Path, num_rows: int) -> None:
    """Print the first scores; rows with unseen values are scored by their numbers and by what id 2 has learned."""
    scores = pq.read_table(path).column("prediction").to_pylist()
    assert len(scores) == num_rows
    for number, score in enumerate(scores[:6]):
        kind = "26 unseen values" if number % 2 else "as it was logged"
        print(f"row {number}, {kind}: click probability {score:.4f}")


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def viviane(*words: object) -> None:
    """Print a command and run it; stop at the first that fails."""
    texts = [str(word) for word in words]
    print(f"$ viviane {shlex.join(texts)}", flush=True)
    start = time.perf_counter()
    sys.argv = ["viviane", *texts]
    try:
        command_line()
    except SystemExit as end:  # as each command ends
        if end.code:
            sys.exit(f"the step above failed with exit code {end.code}")
    print(f"({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
