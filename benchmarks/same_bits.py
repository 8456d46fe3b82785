"""Check that a change keeps every bit: train in two revisions, compare losses, weights, states and predictions.

    python benchmarks/same_bits.py --base REVISION     # REVISION against the working tree
    python benchmarks/same_bits.py --worker FOLDER     # one side: prints a digest of each case as JSON

Each case trains 50 steps on the CPU with one thread: every reference model, every optimizer, mixed precision, clipping,
running means of the weights, raw ids in dynamic tables, and two processes with each sharding type. Checkpoints that the
base revision wrote are loaded by the working tree as well. A case that the base revision does not have is skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
STEPS, ROWS, IDS = 50, 64, 200
SHARDING = ["replicated", "table", "row", "column", "hybrid"]
Case = Callable[[], "tuple[Any, Any]"]  # () -> (model, schema)


def schema_of(kind: str) -> Any:
    """The columns that a family of models needs."""
    import viviane as vv

    plain = [{"name": f"c{n}", "num_ids": IDS} for n in range(4)]
    bag = [{"name": "m", "num_ids": IDS, "kind": "multi_hot"}]
    pair = [{"name": "user", "num_ids": IDS}, {"name": "item", "num_ids": IDS}]
    history = [
        {"name": "seen", "num_ids": IDS, "kind": "sequence", "max_length": 8, "vocabulary": "item"},
        {"name": "item", "num_ids": IDS},
    ]
    raw = [{"name": f"c{n}", "num_ids": None} for n in range(3)]
    labels = [{"name": f"y{n}"} for n in range(2 if kind == "tasks" else 1)]
    columns = {"plain": plain + bag, "tasks": plain, "pair": pair, "history": history, "raw": raw}[kind]
    dense = [] if kind in ("pair", "history") else [{"name": f"x{n}"} for n in range(3)]
    return vv.Schema(labels=labels, dense=dense, categorical=columns)


def batches_of(schema: Any, count: int, part: slice = slice(None)) -> list[Any]:
    """Random batches; `part` selects the rows of one process."""
    from viviane.batch import Batch

    rng = np.random.default_rng(7)
    made = []
    for _ in range(count):
        columns: dict[str, Any] = {label.name: rng.integers(0, 2, ROWS) for label in schema.labels}
        columns |= {one.name: rng.normal(size=ROWS).astype("float32") for one in schema.dense}
        for one in schema.one_hot:
            columns[one.name] = rng.integers(3, one.num_ids or 1 << 40, ROWS)
        for one in schema.bags:
            lengths = rng.integers(0, 8, ROWS)
            columns[one.name] = [rng.integers(3, one.num_ids, length).tolist() for length in lengths]
        made.append(Batch.from_columns(schema, {name: values[part] for name, values in columns.items()}))
    return made


def cases() -> dict[str, Case]:
    """Every case by its name."""
    import viviane as vv
    from viviane.zoo import ZOO

    kinds = {
        "din": "history", "bst": "history", "hstu": "history", "sasrec": "history", "ncf": "pair", "two_tower": "pair",
        "mmoe": "tasks", "ple": "tasks", "shared_bottom": "tasks",
    }  # fmt: skip
    roles: dict[str, Any] = {"two_tower": {"user": "user", "item": "item"}}
    made: dict[str, Case] = {}

    def add(name: str, zoo: str, kind: str, optimizer: Any, **solver: Any) -> None:
        def build() -> tuple[Any, Any]:
            schema = schema_of(kind)
            model = vv.Model(vv.Solver(device="cpu", num_threads=1, lr=0.01, seed=3, **solver), schema)
            model.add(ZOO[zoo](**roles.get(zoo, {})))
            tables_only = optimizer.clip_row_norm or getattr(optimizer, "row_wise", False)
            model.compile(vv.Adam() if tables_only else optimizer, embedding_optimizer=optimizer)
            return model, schema

        made[name] = build

    for zoo in sorted(ZOO):
        add(zoo, zoo, kinds.get(zoo, "plain"), vv.Adam())
    optimizers = {
        "sgd": vv.SGD(), "momentum": vv.SGD(momentum=0.9), "nesterov": vv.SGD(momentum=0.9, nesterov=True),
        "momentum global": vv.SGD(momentum=0.9, update="global"), "adagrad": vv.AdaGrad(),
        "adagrad row-wise": vv.AdaGrad(row_wise=True), "rmsprop": vv.RMSProp(), "adam global": vv.Adam(update="global"),
        "adam lazy": vv.Adam(update="lazy_global"), "ftrl": vv.Ftrl(lambda1=0.001, lambda2=0.01),
        "decay and row clip": vv.Adam(weight_decay=1e-4, clip_row_norm=0.1),
    }  # fmt: skip
    for name, optimizer in optimizers.items():
        add(f"dcn, {name}", "dcn", "plain", optimizer)
    add("dlrm, bf16", "dlrm", "plain", vv.Adam(), precision="bf16")
    add("dcn, clipped, mean of weights", "dcn", "plain", vv.Adam(), clip_grad_norm=0.5, ema_decay=0.9)
    add("dcn, class weights, smoothing", "dcn", "plain", vv.Adam(), class_weights=(1.0, 3.0), label_smoothing=0.1)
    add("dcn, raw ids", "dcn", "raw", vv.AdaGrad())
    return made


def digest(losses: list[float], folder: Path, predictions: Any) -> str:
    """A checksum over losses, every tensor of a checkpoint by name, and predictions."""
    from safetensors.numpy import load_file

    found = hashlib.sha256(np.asarray(losses, dtype=np.float64).tobytes())
    for file in sorted(folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            found.update(f"{file.relative_to(folder)} {name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    found.update(np.ascontiguousarray(predictions).tobytes())
    return found.hexdigest()[:16]


def train(name: str, build: Case, folder: Path) -> str:
    model, schema = build()
    batches = batches_of(schema, STEPS)
    losses = [float(model.trainer.train_step(batch)) for batch in batches]
    target = folder / name.replace(", ", "-").replace(" ", "_")
    model.trainer.save_checkpoint(target)
    return digest(losses, target, model.predict(batches[0]))


def train_sharded(kind: str, folder: Path) -> None:
    """One of two processes; rank 0 prints the digest."""
    import viviane as vv
    from viviane.zoo import ZOO

    schema = schema_of("plain")
    ranks = {"replicated": [], "table": [1]}.get(kind, [0, 1])
    tables = [
        {"table": one.name, "kind": kind, "ranks": ranks, "num_hot": 20 if kind == "hybrid" else 0}
        for one in schema.categorical
    ]
    model = vv.Model(
        vv.Solver(device="cpu", num_threads=1, lr=0.01, seed=3, plan={"world_size": 2, "tables": tables}), schema
    )
    model.add(ZOO["dcn"]())
    model.compile(vv.Adam())
    rank = int(os.environ["RANK"])
    own = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    batches = batches_of(schema, STEPS, own)
    losses = [float(model.trainer.train_step(batch)) for batch in batches]
    model.trainer.save_checkpoint(folder / "sharded")
    predictions = model.predict(batches[0])
    if rank == 0:
        print("DIGEST", digest(losses, folder / "sharded", predictions), flush=True)


def sharded_digest(kind: str, folder: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    done = subprocess.run(
        [*command, "--sharded", kind, "--folder", str(folder)], capture_output=True, text=True, check=False
    )
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("DIGEST")]
    return found[0] if found else f"failed: {done.stderr[-2000:]}"


def work(folder: Path) -> dict[str, str]:
    found = {}
    for name, build in cases().items():
        found[name] = train(name, build, folder)
        print(f"  {name}: {found[name]}", file=sys.stderr, flush=True)
    for kind in SHARDING:
        with tempfile.TemporaryDirectory() as own:
            found[f"two processes, {kind}"] = sharded_digest(kind, Path(own))
            print(f"  two processes, {kind}: {found[f'two processes, {kind}']}", file=sys.stderr, flush=True)
    return found


def load_all(folder: Path) -> list[str]:
    """Load the checkpoints that another revision wrote into fresh models; returns what went wrong."""
    wrong = []
    for name, build in cases().items():
        target = folder / name.replace(", ", "-").replace(" ", "_")
        if not target.exists():
            continue
        try:
            build()[0].trainer.load_checkpoint(target)
        except Exception as error:
            wrong.append(f"{name}: {error}")
    return wrong


def one_side(source: Path, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--base", metavar="REVISION", help="compare the working tree with this revision")
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help="train all cases and print their digests")
    parser.add_argument("--sharded", choices=SHARDING, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sharded:
        train_sharded(arguments.sharded, arguments.folder)
        return 0
    if arguments.worker:
        print(json.dumps(work(arguments.worker)))
        return 0
    if not arguments.base:
        parser.error("give --base REVISION")
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "base"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", str(tree), arguments.base], cwd=ROOT, check=True
        )
        try:
            print(f"== {arguments.base}", file=sys.stderr)
            before = one_side(tree / "src", Path(place) / "before")
            print("== working tree", file=sys.stderr)
            after = one_side(ROOT / "src", Path(place) / "after")
            wrong = load_all(Path(place) / "before")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    different = [name for name in before if before[name] != after.get(name) or before[name].startswith("failed")]
    for name in different:
        print(f"DIFFERENT {name}: {before[name]} {after.get(name)}")
    for line in wrong:
        print(f"CHECKPOINT NOT LOADED {line}")
    print(f"{len(before) - len(different)} of {len(before)} cases are bit-equal; {len(wrong)} checkpoints did not load")
    return 1 if different or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
