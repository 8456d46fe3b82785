"""A small click model with everything that has state: tables of two optimizers, dropout, batch statistics."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AdaGrad, Adam, Solver
from viviane.data import Dataset, write_dataset
from viviane.embedding import CacheSettings, EmbeddingCollection, FeatureConfig, TableConfig
from viviane.schema import Schema
from viviane.training import Trainer

SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "price"}, {"name": "place", "dim": 2}],
    categorical=[
        {"name": "user", "num_ids": 50},
        {"name": "item", "num_ids": 30},
        {"name": "seen", "num_ids": 30, "kind": "multi_hot", "max_length": 8},
    ],
)


def columns(num_rows: int, seed: int) -> dict[str, object]:
    """Rows whose click depends on user, item and price."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(3, 50, num_rows), rng.integers(3, 30, num_rows)
    price = rng.normal(size=num_rows).astype(np.float32)
    score = np.sin(user * 1.3) + np.cos(item * 2.1) + 0.5 * price
    click = (rng.random(num_rows) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)
    return {
        "click": click,
        "price": price,
        "place": rng.normal(size=(num_rows, 2)).astype(np.float32),
        "user": user.astype(np.int32),
        "item": item.astype(np.int32),
        "seen": [rng.integers(3, 30, n).tolist() for n in rng.integers(0, 6, num_rows)],
    }


def make_dataset(folder: Path, num_rows: int, seed: int = 0) -> Dataset:
    return write_dataset(folder, SCHEMA, [columns(num_rows, seed)], rows_per_group=64)


def make_batch(num_rows: int = 16, seed: int = 0, **changed: object) -> Batch:
    return Batch.from_columns(SCHEMA, {**columns(num_rows, seed), **changed}, origin="batch in memory")


class ClickModel(nn.Module):
    def __init__(self, seed: int = 0, hidden: int = 8, cache: CacheSettings | None = None, device: str = "cpu") -> None:
        super().__init__()
        tables = [
            TableConfig(name="user", num_rows=50, dim=4),
            TableConfig(name="item", num_rows=30, dim=4, optimizer=AdaGrad(lr=0.05)),
        ]
        features = [
            FeatureConfig(name="user", table="user"),
            FeatureConfig(name="item", table="item"),
            FeatureConfig(name="seen", table="item", combiner="mean"),
        ]
        self.tables = EmbeddingCollection(tables, features, Adam(), seed=seed, device=device, cache=cache)
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(12 + 3, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 1)
        )
        torch.set_rng_state(generator_state)

    def forward(self, batch: Batch) -> Tensor:
        return self.net(torch.cat([self.tables(batch).flat, batch.dense], 1))


def make_trainer(solver: Solver | None = None, *, hidden: int = 8, **options: object) -> Trainer:
    solver = solver or Solver(batch_size=32, lr=0.01, device="cpu")
    return Trainer(ClickModel(hidden=hidden), SCHEMA, solver, Adam(), progress=False, tensorboard=False, **options)


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Every tensor that training moves: parameters, buffers, optimizer state, tables and theirs."""
    found = {f"module.{name}": one.clone() for name, one in trainer.module.state_dict().items()}
    for name, parameter in trainer.stepper.parameters.items():
        for key, value in trainer.stepper.optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = value.clone()
    found["optimizer.step"] = torch.tensor(trainer.stepper.optimizer.param_groups[0]["step"])
    return found


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if one[name].numpy().tobytes() != other[name].numpy().tobytes()]
    assert not different


LONG = Solver(
    batch_size=16, lr=0.01, epochs=3, checkpoint_every=7, eval_every=11, clip_grad_norm=1.0, patience=50, device="cpu",
    warmup_steps=5, decay_start=10, decay_steps=100, num_threads=1,
)  # fmt: skip


if __name__ == "__main__":  # a run in a process of its own, to be killed: click_model.py DATA RUN_FOLDER HIDDEN PAUSE
    data, run = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = make_trainer(LONG, hidden=int(sys.argv[3]), run_folder=run)
    pause_s = float(sys.argv[4])  # leaves the killer time on a busy machine; changes no number
    trainer.module.register_forward_hook(lambda *_: time.sleep(pause_s))
    trainer.fit(Dataset(data / "train"), Dataset(data / "valid"), resume=True)
