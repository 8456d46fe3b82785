"""What a run tells is what is so: labels of steps, figures of the restored model, probabilities under class weights."""

import json
import math

import numpy as np
import pytest
import torch
from click_model import make_batch, make_trainer

from viviane.batch import Batch
from viviane.config import Solver
from viviane.core.errors import ConfigError, DataError, NumericsError
from viviane.data import write_dataset
from viviane.report import write_report
from viviane.schema import Schema
from viviane.training.history import History
from viviane.training.step.objective import Objective
from viviane.training.trainer_base import check_binary_labels


@pytest.mark.parametrize("bad", [2.0, 3.0, -1.0, -0.01, 1.01, 1e30])
def test_a_step_refuses_labels_that_no_data_set_may_have(bad):
    trainer = make_trainer()
    before = {name: one.clone() for name, one in trainer.module.state_dict().items()}
    with pytest.raises(DataError, match=r"not between 0 and 1\n.*label 'click', row 1 of the batch, batch in memory"):
        trainer.train_step(make_batch(3, click=np.float32([0, bad, 1])))
    assert trainer.step == 0
    assert all(torch.equal(one, before[name]) for name, one in trainer.module.state_dict().items())
    trainer.train_step(make_batch(3))
    with pytest.raises(NumericsError):
        trainer.train_step(make_batch(3, click=np.float32([0, math.nan, 1])))


def test_labels_that_are_optional_or_real_numbers_go_on():
    for label, numbers in (({"optional": True}, [0, 1, -1]), ({"task": "regression"}, [2.5, -7, 0])):
        schema = Schema(labels=[{"name": "y", **label}], dense=[{"name": "x"}])
        trainer_schema = Batch.from_columns(schema, {"y": numbers, "x": [0.0, 1.0, 2.0]})
        check_binary_labels(trainer_schema, schema)
    schema = Schema(labels=[{"name": "y", "optional": True}], dense=[{"name": "x"}])
    with pytest.raises(DataError, match="0 to 1, or -1 for none"):
        check_binary_labels(Batch.from_columns(schema, {"y": [0, -2], "x": [0.0, 1.0]}), schema)
    check_binary_labels(
        Batch.from_columns(schema, {"y": [0.25, 1], "x": [0.0, 1.0]}), schema
    )  # a share of a positive row
    nothing = Batch.from_columns(schema, {"x": [0.0]})
    check_binary_labels(nothing, schema)  # rows to predict


def test_figures_of_a_run_that_went_back_are_those_of_its_model(train, valid, tmp_path):
    settings = Solver(batch_size=32, lr=0.3, epochs=30, patience=3, eval_every=5, restore_best=True, device="cpu")
    trainer = make_trainer(settings, run_folder=tmp_path / "run")
    history = trainer.fit(train, valid)
    best = history.best_row(trainer.lead_metric)
    assert history.restored_step == best["step"] < trainer.step
    assert history.of_model() == best
    told = history.of_model("train")
    assert told is None or told["step"] <= best["step"]
    found = trainer.evaluate(valid)
    assert found[trainer.lead_metric] == best[trainer.lead_metric]
    bins = json.loads((tmp_path / "run" / "valid_histogram.json").read_text())
    assert bins["step"] == best["step"]
    assert bins == json.loads(json.dumps(trainer.gather(valid).histogram(best["step"])))
    more = make_trainer(Solver(batch_size=32, epochs=1, device="cpu")).fit(train, valid)
    assert more.restored_step is None
    assert more.of_model() == more.last()


def test_the_last_table_shows_the_saved_model(capsys):
    from viviane.cli.train import _show

    rows = [{"step": 5, "split": split, "epoch": 1, "auc": 0.75, "loss": 0.5} for split in ("train", "valid")]
    rows += [{"step": 9, "split": split, "epoch": 2, "auc": 0.25, "loss": 0.9} for split in ("train", "valid")]
    history = History(rows)
    history.restored_step, history.stopped = 5, "epochs"
    _show(history)
    told = capsys.readouterr().out
    assert "0.75" in told
    assert "0.25" not in told
    assert "step 5" in told


WEIGHTS = {"class_weights": (1.0, 50.0)}


def rare(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=rows).astype(np.float32)
    return {"y": (rng.random(rows) < 1 / (1 + np.exp(4 - x))).astype(np.float32), "x": x}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    schema = Schema(labels=[{"name": "y"}], dense=[{"name": "x"}])
    return write_dataset(tmp_path_factory.mktemp("rare") / "set", schema, [rare(8000, 1)])


def linear(skewed, **settings):
    from viviane.config import Adam
    from viviane.training import Trainer

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, batch):
            return self.layer(batch.dense)

    solver = Solver(batch_size=256, lr=0.05, epochs=6, device="cpu", **settings)
    options = {"metrics": ["auc", "calibration", "log_loss"], "progress": False, "tensorboard": False}
    return Trainer(Linear(), skewed.schema, solver, Adam(), **options)


def test_class_weights_are_told_and_can_be_taken_out_of_predictions(skewed, caplog):
    plain, weighted = linear(skewed), linear(skewed, **WEIGHTS)
    corrected = linear(skewed, **WEIGHTS, correct_class_weights=True)
    plain.fit(skewed)
    corrected.fit(skewed)
    assert "class_weights" not in caplog.text
    weighted.fit(skewed)
    assert "multiply the odds of all predictions by 50" in caplog.text
    assert weighted.evaluate(skewed)["calibration"] > 10
    found = corrected.evaluate(skewed)
    assert 0.9 < found["calibration"] < 1.1
    assert found["log_loss"] < 1.05 * plain.evaluate(skewed)["log_loss"]
    assert found["loss"] == pytest.approx(found["log_loss"], rel=1e-4)
    # the same training: only what is predicted differs, by the odds
    p, q = weighted.predict(skewed).astype(np.float64), corrected.predict(skewed).astype(np.float64)
    assert np.allclose(q, p / (p + (1 - p) * 50), atol=1e-6)
    assert weighted.evaluate(skewed)["auc"] == found["auc"]


def test_only_binary_labels_are_corrected():
    schema = Schema(labels=[{"name": "a"}, {"name": "b", "task": "regression"}], dense=[{"name": "x"}])
    objective = Objective(schema, Solver(class_weights=(1.0, 4.0), correct_class_weights=True))
    found = objective.predictions(torch.tensor([[0.0, 7.0]]), 1)
    assert found.tolist() == [[pytest.approx(0.2), 7.0]]


@pytest.mark.parametrize("weights", [None, (0.0, 1.0), (1.0, 0.0)])
def test_what_cannot_be_corrected_is_refused(weights):
    with pytest.raises(ConfigError, match="correct_class_weights needs class_weights above 0"):
        Solver(class_weights=weights, correct_class_weights=True)


def test_the_report_shows_the_ratio_of_the_sums(train, valid, tmp_path):
    trainer = make_trainer(Solver(batch_size=32, device="cpu"), run_folder=tmp_path / "run")
    trainer.fit(train, valid)
    bins = trainer.gather(valid).histogram(1)["bins"]
    ratio = sum(b["mean_prediction"] * b["count"] for b in bins) / sum(b["mean_label"] * b["count"] for b in bins)
    text = write_report(tmp_path / "run").read_text()
    assert f"their sum is {ratio:.3g} times that of the labels" in text
