"""Trackers get every row, the settings and the end, whatever happens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import viviane as vv
from viviane.core.errors import ConfigError
from viviane.training import MlflowTracker, WandbTracker
from viviane.training.trackers import Sinks, trackers_of


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.closed = 0

    def start(self, name: str, settings: Mapping[str, Any], step: int) -> None:
        self.settings = {"name": name, "step": step, **settings}

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    def close(self) -> None:
        self.closed += 1


SCHEMA = vv.Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
ROWS = {"y": [0.0, 1.0, 0.0, 0.0] * 16, "c": [3, 4, 5, 6] * 16}


def compiled(**solver: Any) -> vv.Model:
    model = vv.Model(vv.Solver(batch_size=16, device="cpu", **solver), SCHEMA, name="small")
    model.add(vv.zoo.DeepFM(dim=2, deep_mlp=(4,)))
    model.compile()
    return model


def test_a_tracker_gets_settings_and_the_rows_of_the_history() -> None:
    recorder = Recorder()
    history = compiled().fit(ROWS, ROWS, tracker=recorder, verbose=0)
    assert recorder.rows == history.rows
    assert recorder.settings["name"] == "small"
    assert recorder.settings["solver"]["batch_size"] == 16
    assert recorder.closed == 1


def test_a_tracker_is_closed_after_an_error() -> None:
    class Stop(vv.Callback):
        def on_step_end(self, step: int, loss: Any) -> None:
            raise RuntimeError("stop")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="stop"):
        compiled().fit(ROWS, tracker=[recorder], callbacks=[Stop()])
    assert recorder.closed == 1


def test_every_sink_is_closed_though_one_fails() -> None:
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("gone")

    recorder = Recorder()
    with pytest.raises(OSError, match="gone"):
        Sinks([Broken(), recorder]).close()
    assert recorder.closed == 1


def test_names_become_trackers_and_others_are_refused() -> None:
    found, events = trackers_of(["mlflow", "wandb", "tensorboard"])
    assert [type(one) for one in found] == [MlflowTracker, WandbTracker]
    assert events
    with pytest.raises(ConfigError, match="mlflow"):
        trackers_of("mlfow")
    with pytest.raises(ConfigError, match="not a tracker"):
        trackers_of(5)


def test_verbose_two_prints_each_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    compiled().fit(ROWS, ROWS, verbose=2)
    assert "log_loss" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="verbose"):
        compiled().fit(ROWS, verbose=3)


def test_models_data_and_histories_show_themselves_as_html(tmp_path: Path) -> None:
    data = vv.write_dataset(tmp_path / "data", SCHEMA, ROWS)
    model = compiled()
    history = model.fit(data, data, verbose=0)
    for shown, word in ((SCHEMA, "categorical"), (data, "64"), (model, "emb"), (history, "log_loss")):
        text = shown._repr_html_()
        assert text.startswith("<div>")
        assert word in text


def test_mlflow_keeps_parameters_and_curves(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    tracker = MlflowTracker("clicks", uri=f"sqlite:///{tmp_path / 'runs.db'}")
    compiled().fit(ROWS, ROWS, tracker=tracker, verbose=0)
    assert mlflow.active_run() is None
    (run,) = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs.db'}").search_runs(["1"])
    assert run.data.params["solver.batch_size"] == "16"
    assert "valid/auc" in run.data.metrics


def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    compiled().fit(ROWS, ROWS, tracker=WandbTracker(mode="offline", folder=str(tmp_path)), verbose=0)
    assert wandb.run is None
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
