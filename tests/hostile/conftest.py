"""Samples that several modules mutate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw rows, the data set and fitted ETL of them, a config, and a saved model with its checkpoint."""
    from viviane.config import Solver
    from viviane.data import Dataset
    from viviane.etl import EtlConfig, run
    from viviane.model import Model
    from viviane.zoo import DeepFM

    folder = tmp_path_factory.mktemp("whole")
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},{rng.choice(['pen', 'ink', 'cup'])},{rng.normal():.3f}" for _ in range(60)]
    (folder / "raw.csv").write_text("click,item,price\n" + "\n".join(lines) + "\n")
    columns = [{"name": "click", "type": "int"}, {"name": "item"}, {"name": "price", "type": "float"}]
    dense = [{"name": "price", "operators": [{"type": "fill", "value": "mean"}, {"type": "standardize"}]}]
    config = {
        "input": {"columns": columns}, "labels": [{"name": "click"}], "categorical": [{"name": "item"}], "dense": dense,
    }  # fmt: skip
    (folder / "etl.json").write_text(json.dumps(config))
    run(EtlConfig.from_dict(config), folder / "raw.csv", folder / "clean")
    data = Dataset(folder / "clean/train")
    model = Model(Solver(batch_size=16, device="cpu", max_steps=2), data)
    model.add(DeepFM(dim=2, deep_mlp=[2]))
    model.compile(metrics=["auc"])
    model.fit(data, run_folder=folder / "run")
    model.save(folder / "run/model")
    train = {
        "data": {"train": str(folder / "clean/train")}, "solver": {"device": "cpu", "max_steps": 2},
        "model": {"zoo": "deepfm", "dim": 2, "deep_mlp": [2]},
    }  # fmt: skip
    (folder / "train.json").write_text(json.dumps(train))
    return folder
