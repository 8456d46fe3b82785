"""Training begins at the base rate: output biases, weights of rows and classes, and what is left alone."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import viviane as vv
from viviane.core.errors import ConfigError

ROWS = 400


def data(folder: Path, share: float = 0.01, **schema: Any) -> vv.Dataset:
    y = (np.arange(ROWS) % round(1 / share) == 0).astype(np.float32)
    columns = {"y": y, "c": np.arange(ROWS) % 6 + 3, "x": np.zeros(ROWS)}
    if schema.get("sample_weight"):
        columns["w"] = np.where(y == 1, 3.0, 1.0)
    made = vv.Schema(labels=[{"name": "y"}], dense=[{"name": "x"}], categorical=[{"name": "c", "num_ids": 9}], **schema)
    return vv.write_dataset(folder / "data", made, columns)


def first_prediction(recipe: Any, rows: vv.Dataset, **solver: Any) -> float:
    model = vv.Model(vv.Solver(batch_size=64, device="cpu", **solver), rows)
    model.add(recipe)
    model.compile()
    assert model.init_output_bias(rows) == ["y"]
    return float(model.predict(rows).mean())


@pytest.mark.parametrize("name", ["deepfm", "wide_deep", "dcn_v2", "dlrm", "dcn"])
def test_models_of_the_zoo_begin_near_the_base_rate(name: str, tmp_path: Path) -> None:
    assert first_prediction(vv.zoo.ZOO[name](), data(tmp_path)) == pytest.approx(0.01, rel=0.6)


def test_weights_of_rows_and_classes_and_smoothing_count(tmp_path: Path) -> None:
    rows = data(tmp_path, 0.1)
    assert first_prediction(vv.zoo.DeepFM(), rows) == pytest.approx(0.1, rel=0.2)
    assert first_prediction(vv.zoo.DeepFM(), rows, class_weights=(1.0, 9.0)) == pytest.approx(0.5, rel=0.2)
    assert first_prediction(vv.zoo.DeepFM(), rows, label_smoothing=0.5) == pytest.approx(0.3, rel=0.2)
    weighed = data(tmp_path / "weighed", 0.1, sample_weight="w")
    assert first_prediction(vv.zoo.DeepFM(), weighed) == pytest.approx(0.25, rel=0.2)


def test_fit_begins_there_once_and_not_where_it_is_switched_off(tmp_path: Path) -> None:
    rows = data(tmp_path)
    losses = {}
    for wanted in (True, False):
        model = vv.Model(vv.Solver(batch_size=64, device="cpu", max_steps=1, lr=1e-9, init_output_bias=wanted), rows)
        model.add(vv.zoo.DeepFM())
        model.compile()
        model.fit(rows)
        losses[wanted] = model.evaluate(rows)["log_loss"]
    floor = -(0.01 * math.log(0.01) + 0.99 * math.log(0.99))
    assert losses[True] < floor + 0.01 < losses[False]


def test_a_bias_that_the_graph_chooses_stays(tmp_path: Path) -> None:
    rows = data(tmp_path)
    model = vv.Model(vv.Solver(device="cpu"), rows)
    model.add(vv.Input(label="label", dense="dense"))
    model.add(vv.DenseLayer("logit", "InnerProduct", bottom="dense", num_output=1, bias_init_type="uniform"))
    model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
    model.compile()
    assert model.init_output_bias(rows) == []


def test_each_label_of_a_multi_task_model_begins_at_its_own_rate(tmp_path: Path) -> None:
    labels = [{"name": "a"}, {"name": "b", "optional": True, "dtype": "int8"}]
    schema = vv.Schema(labels=labels, categorical=[{"name": "c", "num_ids": 9}])
    n = np.arange(ROWS)
    columns = {"a": (n % 2 == 0) * 1.0, "b": np.where(n % 2 == 0, n % 20 == 0, -1).astype(int), "c": n % 6 + 3}
    rows = vv.write_dataset(tmp_path / "data", schema, columns)
    model = vv.Model(vv.Solver(device="cpu"), rows)
    model.add(vv.zoo.SharedBottom(bottom_mlp=(8,), tower_mlp=(4,)))
    model.compile()
    assert model.init_output_bias(rows) == ["a", "b"]
    assert model.predict(rows).mean(0) == pytest.approx([0.5, 0.1], rel=0.3)


def test_a_torch_module_has_no_output_bias_to_find(tmp_path: Path) -> None:
    import torch

    rows = data(tmp_path)
    model = vv.Model(vv.Solver(device="cpu"), rows, module=torch.nn.Linear(1, 1))
    model.compile()
    with pytest.raises(ConfigError, match="set it yourself"):
        model.init_output_bias(rows)
