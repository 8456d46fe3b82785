"""Sampled negatives in the file of `viviane train`: the same run as in Python, both forms, and what is refused."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from viviane.cli import main
from viviane.cli.train_config import TrainConfig
from viviane.core.errors import ConfigError, VivianeError
from viviane.data import Dataset, NegativeDataset, Negatives, write_dataset
from viviane.model import Model
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "liked"}], categorical=[{"name": "user", "num_ids": 23}, {"name": "item", "num_ids": 33}]
)
NCF = {"zoo": "ncf", "user": "user", "item": "item", "dim": 4, "init": {"type": "normal", "std": 0.1}}
TOWERS = {"zoo": "two_tower", "user": "user", "item": "item", "negatives": "others", "dim": 4, "out_dim": 4}


def viviane(*words: object, cwd: Path, code: int = 0) -> str:
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(main.app, [str(word) for word in words])
    failed = isinstance(done.exception, VivianeError)
    text = done.output + (f"error: {done.exception}" if failed else "")
    assert (2 if failed else done.exit_code) == code, (text, done.exception)
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Users who like every fourth item: 600 rows to train with, 100 to validate, 100 to test."""
    folder = tmp_path_factory.mktemp("likes")
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(3, 23, 1200) * 64 + rng.integers(0, 7, 1200))
    rng.shuffle(pairs)
    user = pairs // 64
    item = 3 + (user - 3) % 4 + 4 * (pairs % 64)
    bounds = (0, 80, 110, len(pairs))
    for name, low, high in zip(("train", "valid", "test"), bounds, bounds[1:], strict=False):
        rows = {"liked": np.ones(high - low), "user": user[low:high], "item": item[low:high]}
        write_dataset(folder / name, SCHEMA, [rows])
    return folder


def config(place: Path, model: dict[str, Any], name: str = "c.json", **negatives: Any) -> dict[str, Any]:
    content = {
        "name": "likes",
        "data": {"train": "train", "validation": "valid", "negatives": {"item": "item", "num": 2, **negatives}},
        "solver": {"batch_size": 30, "lr": 0.01, "epochs": 3, "device": "cpu", "seed": 4},
        "model": model,
        **({"metrics": ["auc"]} if model is NCF else {}),
    }
    (place / name).write_text(json.dumps(content))
    return content


def test_rows_of_negatives_train_as_in_python(place: Path) -> None:
    content = config(place, NCF, user="user", column=None, alpha=0.5, seed=3, seen=["test"])
    viviane("train", "c.json", "--run-folder", "runs/rows", cwd=place)
    wanted = Negatives(item="item", num=2, user="user", column=None, alpha=0.5, seed=3)
    train, valid, test = (Dataset(place / name) for name in ("train", "valid", "test"))
    settings = TrainConfig.from_dict(content)
    data = NegativeDataset(train, wanted, [test])
    model = settings.build(data.schema)
    model.compile(settings.optimizer, metrics=["auc"])
    history = model.fit(data, NegativeDataset(valid, wanted, [train, test]))
    saved = Model.load(place / "runs/rows", device="cpu")
    assert np.array_equal(saved.predict(data), model.predict(data))
    rows = [json.loads(line) for line in (place / "runs/rows/metrics.jsonl").read_text().splitlines()]
    ours = [row for row in rows if row["split"] == "valid"]
    assert ours[-1]["auc"] == history.last("valid")["auc"]
    written = json.loads((place / "runs/rows/train.json").read_text())
    assert written["data"]["negatives"]["seen"] == ["test"]


def test_a_bag_of_negatives_resumes_to_the_same_bits(place: Path) -> None:
    config(place, TOWERS, column="others")
    words = ("--set", "solver.checkpoint_every=2")
    viviane("train", "c.json", *words, "--run-folder", "runs/whole", cwd=place)
    viviane("train", "c.json", *words, "--run-folder", "runs/broken", "--set", "solver.max_steps=4", cwd=place)
    viviane("train", "c.json", *words, "--run-folder", "runs/broken", "--resume", cwd=place)
    models = [Model.load(place / "runs" / name, device="cpu") for name in ("whole", "broken")]
    assert "others" in models[0].schema.column_names
    assert (place / "runs/whole/report.html").exists()  # every validation row is a positive, which has no AUC
    vectors = [dict(model.module.state_dict()) for model in models]
    assert all(np.array_equal(vectors[0][name].numpy(), vectors[1][name].numpy()) for name in vectors[0])
    assert "others" in viviane("summary", "c.json", cwd=place)
    speeds = ("--memory-gb-per-s", 10, "--link-gb-per-s", 1, "--memory-gb", 1)
    assert "Tables" in viviane("plan", "c.json", "--processes", 2, *speeds, cwd=place)
    viviane("trace", "c.json", "--steps", 2, "--output", "trace", cwd=place)
    assert (place / "trace/trace.svg").exists()


def test_validation_rows_may_have_negatives_of_their_own(place: Path) -> None:
    config(place, NCF, column=None, validation=False)
    viviane("train", "c.json", "--run-folder", "runs/own", "--set", 'metrics=["log_loss"]', cwd=place)
    rows = [json.loads(line) for line in (place / "runs/own/metrics.jsonl").read_text().splitlines()]
    found = json.loads(viviane("evaluate", "runs/own", "valid", "--json", "--device", "cpu", cwd=place))
    assert found["rows"] == len(Dataset(place / "valid"))
    assert [row for row in rows if row["split"] == "valid"][-1]["log_loss"] == found["log_loss"]


@pytest.mark.parametrize(
    ("negatives", "message"),
    [
        ({"seen": ["test"]}, "seen are pairs of user and item: name the user's column"),
        ({"validation": False}, "the model reads 'negatives' of validation rows too"),
        ({"itm": "item"}, "unknown key 'itm'|itm"),
        ({"item_columns": ["brand"]}, "item_columns are for negatives in rows"),
    ],
)
def test_what_is_refused(place: Path, negatives: dict[str, Any], message: str) -> None:
    content = config(place, NCF, "refused.json", **negatives)
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(content)


def test_streams_and_columns_that_are_not_there(place: Path) -> None:
    content = config(place, NCF, "stream.json", column=None)
    content["data"]["train"] = "kafka://127.0.0.1:1/likes"
    with pytest.raises(ConfigError, match="which a stream has not"):
        TrainConfig.from_dict(content)
    config(place, NCF, "odd.json", column=None, user="who")
    assert "who" in viviane("train", "odd.json", "--run-folder", "runs/odd", cwd=place, code=2)
    assert not (place / "runs/odd/train.json").exists()
