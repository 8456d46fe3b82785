"""A model whose ids are deduplicated before they are sent trains what one process trains."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import processes

from viviane.config import AdaGrad, Solver
from viviane.core.errors import ConfigError
from viviane.data import Dataset, write_dataset
from viviane.model import Model
from viviane.schema import Schema
from viviane.zoo import DLRM

SCHEMA = Schema(
    labels=[{"name": "y"}],
    dense=[{"name": "x", "dim": 2}],
    categorical=[
        {"name": "user", "num_ids": 60},
        {"name": "item", "num_ids": 40, "vocabulary": "items"},
        {"name": "seen", "num_ids": 40, "vocabulary": "items", "kind": "multi_hot"},
    ],
)
KINDS = {"user": "row", "items": "column"}


def make_data(folder):
    rng = np.random.default_rng(0)
    rows = 32 * 6 + 5  # the last batch is short and uneven
    columns = {
        "y": (rng.random(rows) < 0.3).astype(np.float32),
        "x": rng.normal(size=(rows, 2)).astype(np.float32),
        "user": rng.integers(3, 60, rows).astype(np.int32),
        "item": (3 + 37 * rng.random(rows) ** 3).astype(np.int32),
        "seen": [rng.integers(3, 40, n).tolist() for n in rng.integers(0, 4, rows)],
    }
    write_dataset(folder / "train", SCHEMA, [columns], rows_per_group=32)


def fitted(folder, **changes):
    solver = Solver(batch_size=32, lr=0.05, epochs=2, device="cpu", num_threads=1, seed=3, **changes)
    model = Model(solver, SCHEMA)
    model.add(DLRM(dim=4, bottom_mlp=[8], top_mlp=[8]))
    model.compile(AdaGrad())
    history = model.fit(Dataset(folder / "train"))
    return model, history


def trains_alike(folder, losses, scores):
    ours, history = fitted(folder, plan=KINDS, deduplicate_ids=True)
    (tables,) = ours.trainer.stepper.collections.values()
    assert tables.deduplicate_ids
    # Sums of float32 in another order, through 14 steps of AdaGrad, which divides by their roots.
    assert [row["loss"] for row in history.rows] == pytest.approx(losses, rel=1e-4)
    np.testing.assert_allclose(ours.predict(Dataset(folder / "train")), scores, rtol=1e-3, atol=1e-5)
    with pytest.raises(ConfigError, match=r"solver\.fixed_sizes[\s\S]*deduplicate_ids is on"):
        fitted(folder, plan=KINDS, deduplicate_ids=True, fixed_sizes=True)


def test_two_processes_train_what_one_trains(tmp_path):
    make_data(tmp_path)
    truth, history = fitted(tmp_path, deduplicate_ids=True)  # nothing is sent in one process
    scores = truth.predict(Dataset(tmp_path / "train"))
    processes.run(2, trains_alike, tmp_path, [row["loss"] for row in history.rows], scores)
