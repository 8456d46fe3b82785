"""fit: what it learns, when it evaluates, stops and saves, and that a hand-written loop is the same."""

import json
import logging
import math
import os
import signal
import sys
import tempfile

import numpy as np
import pytest
import torch
from click_model import SCHEMA, ClickModel, assert_same_bits, columns, make_batch, make_trainer, tensors_of
from torch import nn

from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, MissingExtraError, SchemaError
from viviane.data import write_dataset
from viviane.metrics import roc_auc
from viviane.schema import Schema
from viviane.training import Callback, Trainer


def solver(**values):
    return Solver(**{"batch_size": 32, "lr": 0.02, "device": "cpu", **values})


def steps_of(history, split="valid"):
    return [row["step"] for row in history.rows if row["split"] == split]


def test_it_learns_what_the_rows_say(train, valid):
    trainer = make_trainer(solver(epochs=8, lr=0.05))
    history = trainer.fit(train, valid)
    # By construction the clicks are predictable: a model that learned nothing has 0.5.
    assert history.best("auc") > 0.72
    assert history.rows[0]["loss"] > history.last("train")["loss"]
    assert history.stopped == "epochs"
    assert trainer.step == 8 * 19
    assert trainer.epoch == 8


def test_a_loop_of_ones_own_gives_the_same_bits(train):
    by_fit = make_trainer(solver(epochs=2))
    by_fit.fit(train)
    by_hand = make_trainer(solver(epochs=2))
    with by_hand.switches(), train.reader(32, shuffle=True, seed=0) as reader:
        for _ in range(2):
            for batch in reader:
                by_hand.train_step(batch)
    assert_same_bits(tensors_of(by_fit), tensors_of(by_hand))


def test_the_learning_rate_follows_the_schedule(train, tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(
        solver(lr=1e-2, warmup_steps=4, decay_start=8, decay_steps=8, max_steps=18, end_lr=1e-4),
        run_folder=run, log_every=1,
    )  # fmt: skip
    rows = [row for row in trainer.fit(train).rows if row["split"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 19))
    assert [row["lr"] for row in rows[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rows[6]["lr"] == 0.01
    assert rows[11]["lr"] == pytest.approx(0.01 * (4 / 8) ** 2)
    assert rows[17]["lr"] == 1e-4


def test_own_rates_of_tables_and_dense_follow_the_same_factor(train):
    table, dense = ClickModel(), ClickModel()
    for module in (table, dense):
        module.net[3].p = 0.0
    half = Trainer(table, SCHEMA, solver(lr=1.0, warmup_steps=2), Adam(lr=0.01), progress=False)
    half.train_step(make_batch())
    full = Trainer(dense, SCHEMA, solver(lr=1.0), Adam(lr=0.005), progress=False)
    full.train_step(make_batch())
    torch.testing.assert_close(table.net[0].weight, dense.net[0].weight, rtol=0, atol=0)
    # The item table has lr=0.05 of its own: half a factor, half a move (AdaGrad's first move is lr sign(g)).
    start = ClickModel().tables.export_table("item").weight
    moved = table.tables.export_table("item").weight - start
    torch.testing.assert_close(2 * moved, dense.tables.export_table("item").weight - start, rtol=1e-4, atol=1e-7)


def test_drop_last_and_max_steps(train):
    assert len(train) % 32
    kept, dropped = make_trainer(solver(shuffle=False)), make_trainer(solver(shuffle=False, drop_last=True))
    kept.fit(train)
    dropped.fit(train)
    assert (kept.step, dropped.step) == (19, 18)
    short = make_trainer(solver(max_steps=5, epochs=9))
    assert short.fit(train).stopped == "max_steps"
    assert short.step == 5


def test_when_evaluations_happen(train, valid):
    assert steps_of(make_trainer(solver(epochs=2)).fit(train, valid)) == [19, 38]
    assert steps_of(make_trainer(solver(eval_every=8)).fit(train, valid)) == [8, 16, 19]
    assert steps_of(make_trainer(solver(max_steps=5)).fit(train, valid)) == [5]
    assert steps_of(make_trainer(solver(epochs=2)).fit(train)) == []


def test_max_eval_batches_limits_fit_alone(train, valid, monkeypatch):
    trainer = make_trainer(solver(eval_batch_size=50, max_eval_batches=2))
    seen = []
    monkeypatch.setattr(trainer, "gather", lambda *a, **k: (seen.append(k), Trainer.gather(trainer, *a, **k))[1])
    trainer.fit(train, valid)
    assert seen == [{"max_batches": 2}]
    monkeypatch.undo()
    assert trainer.gather(valid).num_rows == 200
    assert trainer.gather(valid, max_batches=2).num_rows == 100


def test_it_stops_at_the_target(train, valid):
    history = make_trainer(solver(epochs=20, target={"auc": 0.55, "loss": 5.0})).fit(train, valid)
    assert history.stopped == "target"
    values = [row["auc"] for row in history.rows if row["split"] == "valid"]
    assert values[-1] >= 0.55
    assert all(value < 0.55 for value in values[:-1])
    with pytest.raises(ConfigError, match=r"solver\.target names a metric.*\n.*acu"):
        make_trainer(solver(target={"acu": 0.8}))
    with pytest.raises(ConfigError, match="neither higher nor lower"):
        make_trainer(solver(target={"calibration": 1.0}), metrics=["auc", "calibration"])


def test_patience_and_restore_best(train, valid, tmp_path):
    # A huge learning rate makes later evaluations worse than the best one.
    settings = solver(epochs=30, patience=3, restore_best=True, lr=0.3, eval_every=5)
    for folder in (None, tmp_path / "run"):
        trainer = make_trainer(settings, run_folder=folder)
        history = trainer.fit(train, valid)
        assert history.stopped == "patience"
        best = history.best_row("auc")
        assert best is not history.last("valid")
        assert trainer.evaluate(valid)["auc"] == best["auc"]
    index = json.loads((tmp_path / "run/checkpoints/index.json").read_text())
    assert index["best"]["score"] == best["auc"]
    assert index["best"]["folder"] == f"step-{best['step']:08d}"
    assert (tmp_path / "run/checkpoints" / index["latest"]).exists()


def test_a_run_with_a_folder_makes_no_temporary_one(train, valid, tmp_path, monkeypatch):
    """A killed process could not remove it."""
    make, made = tempfile.mkdtemp, []
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args: made.append(args) or make(*args))
    settings = solver(epochs=1, restore_best=True, eval_every=5)
    make_trainer(settings, run_folder=tmp_path / "run").fit(train, valid)
    assert not made
    make_trainer(settings).fit(train, valid)
    assert len(made) == 1


@pytest.mark.parametrize("name", ["target", "patience", "restore_best", "eval_every"])
def test_settings_that_need_validation_data(train, name):
    value = {"target": {"auc": 0.9}, "patience": 1, "restore_best": True, "eval_every": 5}[name]
    with pytest.raises(ConfigError, match=rf"solver\.{name} needs validation data"):
        make_trainer(solver(**{name: value})).fit(train)


def test_callbacks_see_everything_and_can_stop(train, valid):
    class Watch(Callback):
        def __init__(self):
            self.seen = []

        def on_fit_start(self, trainer):
            self.seen.append(("start", trainer.step))

        def on_step_end(self, step, loss):
            assert not loss.requires_grad
            self.seen.append(("step", step))

        def on_evaluate_end(self, step, metrics):
            self.seen.append(("evaluate", step, sorted(metrics)))
            return step == 4

        def on_fit_end(self, history):
            self.seen.append(("end", history.stopped))

    watch = Watch()
    make_trainer(solver(eval_every=2), callbacks=[watch]).fit(train, valid)
    names = ["auc", "log_loss", "loss"]
    assert watch.seen == [
        ("start", 0), ("step", 1), ("step", 2), ("evaluate", 2, names),
        ("step", 3), ("step", 4), ("evaluate", 4, names), ("end", "callback"),
    ]  # fmt: skip


class PressCtrlC(Callback):
    def on_step_end(self, step, loss):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_is_heard_and_resume_is_named_where_it_can_be_done(train, tmp_path, caplog, saves):
    make_trainer(solver(), callbacks=[PressCtrlC()], run_folder=tmp_path if saves else None).fit(train)
    heard, ended = [one.message for one in caplog.records]
    assert heard == "interrupted: ending after this step; press Ctrl-C again to stop at once"
    assert ended == "interrupted at step 9" + ("; continue with resume=True" if saves else "")


def test_ctrl_c_saves_and_resume_goes_on_to_the_same_bits(train, tmp_path):
    straight = make_trainer(solver())
    straight.fit(train)
    before = signal.getsignal(signal.SIGINT)
    history = make_trainer(solver(), callbacks=[PressCtrlC()], run_folder=tmp_path).fit(train)
    assert signal.getsignal(signal.SIGINT) is before
    assert history.interrupted
    assert (tmp_path / "checkpoints/step-00000009/manifest.json").exists()
    again = make_trainer(solver(), callbacks=[Callback()], run_folder=tmp_path)
    assert again.fit(train, resume=True).stopped == "epochs"
    assert_same_bits(tensors_of(straight), tensors_of(again))


def test_a_second_fit_goes_on(train):
    twice, once = make_trainer(solver()), make_trainer(solver(epochs=2))
    twice.fit(train)
    twice.fit(train)
    once.fit(train)
    assert_same_bits(tensors_of(once), tensors_of(twice))


def test_evaluate_and_predict_agree_and_leave_training_alone(train, valid):
    trainer = make_trainer(solver())
    trainer.fit(train)
    before = tensors_of(trainer)
    trainer.module.net[3].eval()  # a part whose mode was set by hand keeps it
    values = trainer.evaluate(valid, batch_size=33)
    predictions = trainer.predict(valid, batch_size=27)
    assert_same_bits(before, tensors_of(trainer))
    assert trainer.module.training
    assert not trainer.module.net[3].training
    labels = np.concatenate([batch.labels.numpy() for batch in valid.reader(200)])
    assert predictions.shape == labels.shape == (200, 1)
    assert values["auc"] == pytest.approx(roc_auc(predictions[:, 0], labels[:, 0]), abs=1e-12)
    losses = -np.where(labels == 1, np.log(predictions), np.log1p(-predictions)).astype(np.float64)
    # float32 probabilities give the logarithm about 7 digits.
    assert values["loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_another_schema_is_refused(train, tmp_path):
    other = Schema(labels=[{"name": "click"}], dense=[{"name": "price"}])
    data = write_dataset(tmp_path / "other", other, [{"click": [0.0], "price": [1.0]}])
    with pytest.raises(SchemaError, match=r"columns differ from the model's.*'item' is missing"):
        make_trainer().fit(data)
    with pytest.raises(SchemaError, match="columns differ from the model's"):
        make_trainer().predict(data)


def test_a_set_without_a_whole_batch_is_refused(train):
    with pytest.raises(ConfigError, match=r"(?s)has no complete batch.*drop_last=False"):
        make_trainer(solver(batch_size=1000, drop_last=True)).fit(train)


def test_the_metrics_of_several_labels_and_regression(tmp_path):
    schema = Schema(
        labels=[{"name": "a"}, {"name": "b"}, {"name": "stars", "task": "regression"}], dense=[{"name": "x", "dim": 3}]
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    rows = {"a": (x[:, 0] > 0) * 1.0, "b": (x[:, 1] > 0) * 1.0, "stars": 3 * x[:, 2] + 1, "x": x}
    data = write_dataset(tmp_path / "d", schema, [{name: v.astype(np.float32) for name, v in rows.items()}])

    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, batch):
            return self.layer(batch.dense)

    trainer = Trainer(
        Linear(), schema, solver(epochs=40, lr=0.1), Adam(), metrics=["auc", "mean_squared_error"], progress=False
    )
    history = trainer.fit(data, data)
    values = {k: v for k, v in history.last("valid").items() if k.split("/")[0] in ("auc", "mean_squared_error")}
    assert set(values) == {
        "auc", "auc/a", "auc/b",
        "mean_squared_error", "mean_squared_error/a", "mean_squared_error/b", "mean_squared_error/stars",
    }  # fmt: skip
    assert values["auc"] == (values["auc/a"] + values["auc/b"]) / 2 > 0.99
    assert values["mean_squared_error/stars"] < 0.05
    stars = trainer.predict(data)[:, 2]
    assert np.abs(stars - rows["stars"]).mean() < 0.2


def test_metrics_that_do_not_fit_are_refused():
    numbers = Schema(labels=[{"name": "y", "task": "regression"}], dense=[{"name": "x"}])
    with pytest.raises(ConfigError, match="needs a binary label"):
        Trainer(nn.Linear(1, 1), numbers, solver(), SGD(), metrics=["auc"])
    assert Trainer(nn.Linear(1, 1), numbers, solver(), SGD()).metrics == ("mean_squared_error",)
    with pytest.raises(ConfigError, match="unknown metric"):
        make_trainer(metrics=["acu"])
    with pytest.raises(ConfigError, match="class_weights and label_smoothing need the built-in loss"):
        Trainer(nn.Linear(1, 1), numbers, solver(class_weights=(1.0, 2.0)), SGD())
    with pytest.raises(ConfigError, match="neither parameters nor embedding tables"):
        Trainer(nn.ReLU(), numbers, solver(), SGD())


def test_an_undefined_auc_does_not_stop_training(train, tmp_path):
    rows = {**columns(40, 5), "click": np.zeros(40, np.float32)}
    ones = write_dataset(tmp_path / "zeros", SCHEMA, [rows])
    trainer = make_trainer(solver(patience=5), run_folder=tmp_path / "run")
    history = trainer.fit(train, ones)
    assert math.isnan(history.last("valid")["auc"])
    assert '"auc": null' in (tmp_path / "run/metrics.jsonl").read_text()
    assert history.stopped == "epochs"


def test_tensorboard_true_without_it_names_the_extra(train, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    trainer = Trainer(
        ClickModel(), SCHEMA, solver(), Adam(), run_folder=tmp_path / "run", tensorboard=True, progress=False
    )
    with pytest.raises(MissingExtraError, match=r"viviane\[tracking\]"):
        trainer.fit(train)
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="need a run folder"):
        Trainer(ClickModel(), SCHEMA, solver(), Adam(), tensorboard=True, progress=False).fit(train)


def test_the_log_says_what_happens(train, valid, caplog):
    with caplog.at_level(logging.INFO, logger="viviane"):
        make_trainer(solver(), log_every=10).fit(train, valid)
    assert any("step 10 train: loss" in message for message in caplog.messages)
    assert any("step 19 valid: loss" in message and "auc" in message for message in caplog.messages)
