"""The run folder: files that people and the report read; progress; histories."""

import io
import itertools
import json
import re
import time

import pytest
from click_model import SCHEMA, ClickModel, make_trainer

from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError
from viviane.schema import Schema
from viviane.training import Callback, History, Trainer
from viviane.training.progress import ProgressLine

SOLVER = Solver(batch_size=32, lr=0.02, epochs=2, device="cpu")


def test_what_a_run_leaves(train, valid, tmp_path):
    run = tmp_path / "run"
    trainer = make_trainer(SOLVER, run_folder=run, log_every=10, config={"name": "mine"})
    history = trainer.fit(train, valid)
    assert sorted(p.name for p in run.iterdir()) == [
        "checkpoints", "config.json", "data_info.json", "machine.json", "metrics.jsonl", "schema.json", "stages.json",
        "valid_histogram.json",
    ]  # fmt: skip
    config = json.loads((run / "config.json").read_text())
    assert config["solver"]["batch_size"] == 32
    assert config["optimizer"]["type"] == "adam"
    assert config["name"] == "mine"
    assert Schema.load(run) == SCHEMA
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == history.rows
    assert [(row["split"], row["step"], row["epoch"]) for row in rows] == [
        ("train", 10, 0), ("valid", 19, 1), ("train", 20, 1), ("train", 30, 1), ("valid", 38, 2), ("train", 38, 2),
    ]  # fmt: skip
    assert list(rows[1]) == [
        "step", "epoch", "split", "loss", "auc", "log_loss", "lr", "samples_per_second", "seconds",
    ]  # fmt: skip
    assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(rows))
    assert [p.name for p in sorted((run / "checkpoints").iterdir())] == [
        "index.json", "step-00000019", "step-00000038",
    ]  # fmt: skip


def test_stages_and_calibration(train, valid, tmp_path):
    run = tmp_path / "run"
    make_trainer(SOLVER, run_folder=run).fit(train, valid)
    stages = json.loads((run / "stages.json").read_text())
    assert list(stages) == ["data_wait", "forward", "backward", "update", "evaluate", "checkpoint"]
    assert all(seconds > 0 for seconds in stages.values())
    bins = json.loads((run / "valid_histogram.json").read_text())["bins"]
    assert sum(one["count"] for one in bins) == 200
    clicks = sum(float(batch.labels.sum()) for batch in valid.reader(100))
    assert sum(one["count"] * one["mean_label"] for one in bins) == pytest.approx(clicks)


def test_a_folder_with_a_run_is_not_overwritten(train, tmp_path):
    make_trainer(SOLVER, run_folder=tmp_path).fit(train)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"(?s)already holds a run.*resume=True, or choose another folder"):
        make_trainer(SOLVER, run_folder=tmp_path).fit(train)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    with pytest.raises(ConfigError, match="resume=True needs a run folder"):
        make_trainer(SOLVER).fit(train, resume=True)


def test_resume_of_a_finished_run_does_nothing_and_more_epochs_go_on(train, valid, tmp_path):
    make_trainer(SOLVER, run_folder=tmp_path).fit(train, valid)
    again = make_trainer(SOLVER, run_folder=tmp_path)
    rows = again.fit(train, valid, resume=True).rows
    assert again.step == 38
    assert [row["step"] for row in rows if row["split"] == "valid"] == [19, 38]
    longer = make_trainer(SOLVER.model_copy(update={"epochs": 3}), run_folder=tmp_path)
    longer.fit(train, valid, resume=True)
    assert longer.step == 57


def test_a_run_that_its_patience_stopped_stays_stopped(train, valid, tmp_path):
    solver = SOLVER.model_copy(update={"epochs": 50, "patience": 2, "lr": 0.3, "eval_every": 3})
    first = make_trainer(solver, run_folder=tmp_path)
    assert first.fit(train, valid).stopped == "patience"
    again = make_trainer(solver, run_folder=tmp_path)
    assert again.fit(train, valid, resume=True).stopped == "patience"
    assert again.step == first.step


def test_states_of_callbacks_come_back(train, tmp_path):
    class Count(Callback):
        num_steps = 0

        def on_step_end(self, step, loss):
            self.num_steps += 1

        def state(self):
            return {"num_steps": self.num_steps}

        def restore(self, state):
            self.num_steps = state["num_steps"]

    make_trainer(SOLVER.model_copy(update={"max_steps": 10}), run_folder=tmp_path, callbacks=[Count()]).fit(train)
    count = Count()
    make_trainer(SOLVER, run_folder=tmp_path, callbacks=[count]).fit(train, resume=True)
    assert count.num_steps == 38


def test_tensorboard_gets_the_curves(train, valid, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    Trainer(ClickModel(), SCHEMA, SOLVER, Adam(), run_folder=tmp_path, progress=False, tensorboard=True).fit(
        train, valid
    )
    log = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"valid/auc", "valid/loss", "train/loss", "train/lr"} <= set(log.Tags()["scalars"])
    assert [event.step for event in log.Scalars("valid/auc")] == [19, 38]


def test_progress_is_quiet_away_from_a_terminal(train, valid, capfd):
    Trainer(ClickModel(), SCHEMA, SOLVER, Adam(), tensorboard=False).fit(train, valid)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("terminal", "count"), [(True, "50/100"), (False, "step 50 of 100")])
def test_progress_shows_rate_loss_metric_and_time_left(monkeypatch, terminal, count):
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setattr("viviane.training.progress._REFRESH_S", 0.0)
    monkeypatch.setattr("viviane.training.progress._LINE_S", 0.0)
    line = ProgressLine(100, 40, shown=True)
    line.evaluated({"auc": 0.75, "loss": 0.5, "auc/click": 0.75})
    time.sleep(0.05)
    line.step(50, 4096, lambda: 0.4321)
    line.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert count in text
    assert "samples/s" in text
    assert "loss 0.4321" in text
    assert "auc 0.7500" in text
    assert "left" in text


def test_history_finds_the_best_by_each_metrics_direction():
    rows = [
        {"step": 1, "split": "valid", "auc": 0.6, "log_loss": 0.5},
        {"step": 2, "split": "valid", "auc": None, "log_loss": 0.4},
        {"step": 3, "split": "valid", "auc": 0.7, "log_loss": 0.6},
        {"step": 4, "split": "valid", "auc": float("nan"), "log_loss": 0.7},
    ]
    history = History(rows)
    assert history.best("auc") == 0.7
    assert history.best_row("log_loss")["step"] == 2
    with pytest.raises(ConfigError, match=r"has this metric\n.*'accuracy'\n.*choose one of: auc, log_loss"):
        history.best("accuracy")
    with pytest.raises(ConfigError, match="pass validation data to fit"):
        History([{"split": "train", "loss": 0.1}]).best("auc")
