"""A small schema with every kind of column, a data set of it, and a graph."""

import numpy as np
import pytest

from viviane.config import Solver
from viviane.data import Dataset, write_dataset
from viviane.model import DenseLayer, Input, Model, SparseEmbedding
from viviane.schema import Schema

SCHEMA = Schema(
    labels=[{"name": "click"}],
    dense=[{"name": "price"}, {"name": "vector", "dim": 2}],
    categorical=[
        {"name": "user", "num_ids": 30},
        {"name": "item", "num_ids": 20},
        {"name": "seen", "num_ids": 20, "kind": "multi_hot", "vocabulary": "item", "max_length": 4},
    ],
)


def make_rows(count: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    user, item = rng.integers(3, 30, count), rng.integers(3, 20, count)
    click = rng.random(count) < 1 / (1 + np.exp(-2 * np.sin(user) - 2 * np.cos(item)))
    return {
        "click": click.astype("float32"),
        "price": rng.normal(size=count).astype("float32"),
        "vector": rng.normal(size=(count, 2)).astype("float32"),
        "user": user.astype("int32"),
        "item": item.astype("int32"),
        "seen": [rng.integers(3, 20, length).tolist() for length in rng.integers(0, 5, count)],
    }


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "train", SCHEMA, [make_rows(2000)])


@pytest.fixture(scope="session")
def valid(tmp_path_factory) -> Dataset:
    return write_dataset(tmp_path_factory.mktemp("data") / "valid", SCHEMA, [make_rows(500, seed=1)])


def small_model(**solver) -> Model:
    model = Model(Solver(**{"batch_size": 128, "lr": 0.01, "device": "cpu", **solver}), SCHEMA, name="small")
    model.add(Input(label="label", dense="dense", sparse="cats"))
    model.add(SparseEmbedding("emb", bottom="cats", dim=4))
    model.add(DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
    model.add(DenseLayer("x", "Concat", bottom=["flat", "dense"]))
    model.add(DenseLayer("deep", "MLP", bottom="x", num_outputs=[16]))
    model.add(DenseLayer("logit", "InnerProduct", bottom="deep", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    return model


@pytest.fixture
def model() -> Model:
    return small_model()


@pytest.fixture
def rows():
    return make_rows


@pytest.fixture
def build():
    return small_model
