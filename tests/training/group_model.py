"""A click model for one process or many, and the same model trained alone as the truth.

Run as a script, it is a job for torchrun: group_model.py DATA RUN_FOLDER [kill|stop|nan|term RANK STEP].
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AdaGrad, Adam, Solver
from viviane.data import Dataset, write_dataset
from viviane.embedding import FeatureConfig, TableConfig
from viviane.parallel import Group, join_processes, make_tables
from viviane.schema import Schema
from viviane.training import Callback, Trainer

SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "price", "dim": 3}],
    categorical=[
        {"name": "user", "num_ids": 53},
        {"name": "item", "num_ids": 31},
        {"name": "seen", "num_ids": 31, "kind": "multi_hot", "max_length": 8},
    ],
    sample_weight="weight",
)
PLAN = {"user": "row", "item": "table"}
NUM_TRAIN, NUM_VALID, BATCH = 32 * 16 + 3, 32 * 5 + 1, 32  # a last batch of fewer rows than four processes


def columns(num_rows: int, seed: int) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(3, 53, num_rows), rng.integers(3, 31, num_rows)
    price = rng.normal(size=(num_rows, 3)).astype(np.float32)
    score = np.sin(user * 1.3) + np.cos(item * 2.1) + 0.5 * price[:, 0]
    return {
        "click": (rng.random(num_rows) < 1 / (1 + np.exp(-2 * score))).astype(np.float32),
        "price": price,
        "user": user.astype(np.int32),
        "item": item.astype(np.int32),
        "seen": [rng.integers(3, 31, n).tolist() for n in rng.integers(0, 6, num_rows)],
        "weight": rng.integers(0, 4, num_rows).astype(np.float32),  # some rows count nothing
    }


def make_data(folder: Path) -> None:
    for name, rows, seed in (("train", NUM_TRAIN, 1), ("valid", NUM_VALID, 2)):
        write_dataset(folder / name, SCHEMA, [columns(rows, seed)], rows_per_group=64)


class Clicks(nn.Module):
    def __init__(self, group: Group, *, dropout: float = 0.0, device: str = "cpu", seed: int = 0) -> None:
        super().__init__()
        tables = [
            TableConfig(name="user", num_rows=53, dim=4),
            TableConfig(name="item", num_rows=31, dim=4, optimizer=AdaGrad(lr=0.05)),
        ]
        features = [
            FeatureConfig(name="user", table="user"),
            FeatureConfig(name="item", table="item"),
            FeatureConfig(name="seen", table="item", combiner="mean"),
        ]
        self.tables = make_tables(tables, features, Adam(), seed=seed, group=group, plan=PLAN, device=device)
        torch.manual_seed(seed + group.rank)  # ranks begin apart: the trainer puts them together
        # No bias before the batch norm: its gradient is 0 but for rounding, which Adam would blow up to steps of lr.
        self.net = nn.Sequential(
            nn.Linear(12 + 3, 8, bias=False),
            nn.BatchNorm1d(8, momentum=0.1),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(8, 1),
        )
        self.unused = nn.Linear(2, 2)  # never gets a gradient

    def forward(self, batch: Batch) -> Tensor:
        return self.net(torch.cat([self.tables(batch).flat, batch.dense], 1))


def settings(**changes: object) -> Solver:
    base = {"batch_size": BATCH, "eval_batch_size": 48, "lr": 0.01, "epochs": 3, "clip_grad_norm": 0.3, "seed": 4}
    return Solver(**{**base, "device": "cpu", "num_threads": 1, **changes})


def make_trainer(group: Group, solver: Solver, *, dropout: float = 0.0, **options: object) -> Trainer:
    module = Clicks(group, dropout=dropout, device="cuda" if solver.device == "cuda" else "cpu")
    quiet = {"progress": False, "tensorboard": False}
    return Trainer(module, SCHEMA, solver, Adam(), group=group, **quiet, **options)


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Dense parameters, buffers and their optimizer's state, whole tables and theirs: equal on every process."""
    found = {name: one.detach().clone() for name, one in trainer.module.state_dict().items() if "tables." not in name}
    for name, parameter in trainer.stepper.parameters.items():
        for key, value in trainer.stepper.optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value.clone()
    for table in trainer.module.tables.tables:
        content = trainer.module.tables.export_table(table)
        found |= {f"{table}.weight": content.weight, f"{table}.step": torch.tensor(content.step)}
        found |= {f"{table}.{name}": part for name, part in content.state.items()}
    return {name: one.cpu() for name, one in found.items()}


class Trouble(Callback):
    """Does something to one process at one step."""

    def __init__(self, what: str, rank: int, step: int, group: Group) -> None:
        self.what, self.is_here, self.at, self.group = what, rank == group.rank, step, group

    def on_step_end(self, step: int, loss: Tensor) -> None:
        if self.what == "stop" and step == 3:
            self.group.watch.timeout_s = 6.0  # from now on: nobody compiles any more
        if self.is_here and step == self.at:
            numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
            if self.what == "error":
                raise OSError("the disk has gone")
            os.kill(os.getpid(), numbers[self.what])


if __name__ == "__main__":
    data, run = Path(sys.argv[1]), Path(sys.argv[2])
    # On a busy machine the first step of a process may come many seconds after another's.
    kind = "cuda" if torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1")) else "cpu"
    solver = settings(peer_timeout_s=90, checkpoint_every=5, eval_every=17, device=kind)
    group = join_processes(kind, solver.peer_timeout_s)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    trouble = [Trouble(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), group)] if len(sys.argv) > 3 and first else []
    trainer = make_trainer(group, solver, dropout=0.2, run_folder=run, callbacks=trouble)
    trainer.fit(Dataset(data / "train"), Dataset(data / "valid"))
    if group.rank == 0:
        torch.save({"history": trainer.history.rows, "stopped": trainer.history.stopped}, run / "history.pt")
    whole = tensors_of(trainer)
    if group.rank == 0:
        torch.save(whole, run / "end.pt")
