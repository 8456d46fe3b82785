"""Experiment trackers: write the rows of a run to MLflow, Weights & Biases or TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from viviane.core.errors import ConfigError, suggest
from viviane.core.optional import require

_NOT_CURVES: Final = {"step", "epoch", "split"}
_LONGEST_PARAMETER: Final = 500  # limit of MLflow's stores, in characters


@runtime_checkable
class Tracker(Protocol):
    """Interface of `fit(tracker=...)`: receives the start, each row of metrics, and the end of a run."""

    def start(self, name: str, settings: Mapping[str, Any], step: int) -> None:
        """Begin a run.

        Args:
            name: name of the model.
            settings: settings of the run, as in config.json.
            step: first step; above 0 on a resume.
        """

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row: step, epoch, split, and metrics by name."""

    def close(self) -> None:
        """End the run; called after errors, too."""


class MlflowTracker:
    """Writes to an MLflow server or store.

    An active run is used and stays open; otherwise a run is started and ended.

    Args:
        experiment: name of the experiment; None uses MLflow's active one.
        uri: address of the server or store, such as "sqlite:///runs.db"; None uses MLflow's setting.
    """

    def __init__(self, experiment: str | None = None, uri: str | None = None) -> None:
        self.experiment, self.uri = experiment, uri
        self._mlflow: Any = None
        self._own = False

    def start(self, name: str, settings: Mapping[str, Any], step: int) -> None:
        """Begin a run, and log the settings as parameters."""
        mlflow = self._mlflow = require("mlflow", extra="mlflow", purpose="tracking with MLflow")
        if self.uri is not None:
            mlflow.set_tracking_uri(self.uri)
        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        self._own = mlflow.active_run() is None
        if self._own:
            mlflow.start_run(run_name=name)
        if step == 0:
            mlflow.log_params({key: value[:_LONGEST_PARAMETER] for key, value in flat(settings).items()})

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a row as metrics such as "valid/auc"."""
        self._mlflow.log_metrics(curves(row), step=row["step"])

    def close(self) -> None:
        """End the run if this tracker started it."""
        if self._mlflow is not None and self._own:
            self._mlflow.end_run()
            self._own = False


class WandbTracker:
    """Writes to Weights & Biases; offline with WANDB_MODE=offline or mode="offline".

    An active run is used and stays open; otherwise a run is started and ended.

    Args:
        project: name of the project.
        mode: "online", "offline" or "disabled"; None uses W&B's setting.
        folder: folder for its files; None uses W&B's default.
    """

    def __init__(self, project: str = "viviane", mode: str | None = None, folder: str | None = None) -> None:
        self.project, self.mode, self.folder = project, mode, folder
        self._run: Any = None
        self._own = False

    def start(self, name: str, settings: Mapping[str, Any], step: int) -> None:
        """Begin a run with the settings as its config."""
        wandb = require("wandb", extra="wandb", purpose="tracking with Weights & Biases")
        self._own = wandb.run is None
        if self._own:
            self._run = wandb.init(project=self.project, name=name, mode=self.mode, dir=self.folder)
        else:
            self._run = wandb.run
        self._run.config.update(json.loads(json.dumps(dict(settings), default=str)), allow_val_change=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of a row as metrics such as "valid/auc", over "step"."""
        self._run.log({**curves(row), "step": row["step"]})

    def close(self) -> None:
        """End the run if this tracker started it."""
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None


_KINDS: Final = {"mlflow": MlflowTracker, "wandb": WandbTracker}
NAMES: Final = ("mlflow", "tensorboard", "wandb")


def trackers_of(given: Any) -> tuple[list[Tracker], bool]:
    """Return trackers, and whether TensorBoard is requested, whose events go to the run folder.

    Args:
        given: a name, a tracker, or a sequence of these; None: no tracker.

    Raises:
        ConfigError: an unknown name, or an object that is not a tracker.

    Example:
        >>> trackers_of("tensorboard")
        ([], True)
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [] if given is None else [given]
    found: list[Tracker] = []
    for one in several:
        if isinstance(one, str):
            if one not in NAMES:
                raise ConfigError("unknown tracker", value=one, allowed=", ".join(NAMES), fix=suggest(one, NAMES))
            if one in _KINDS:
                found.append(_KINDS[one]())
        elif isinstance(one, Tracker) and not isinstance(one, type):
            found.append(one)
        else:
            allowed = f"{', '.join(NAMES)}, or an object with start, write and close"
            raise ConfigError("not a tracker", value=repr(one)[:80], allowed=allowed)
    return found, "tensorboard" in several


def curves(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row, by names such as "valid/auc".

    Example:
        >>> curves({"step": 3, "split": "valid", "epoch": 1, "auc": 0.7})
        {'valid/auc': 0.7}
    """
    return {
        f"{row['split']}/{name}".replace("@", "_at_").replace(":", "_"): float(value)
        for name, value in row.items()
        if name not in _NOT_CURVES and isinstance(value, int | float) and math.isfinite(value)
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as a flat dict of strings; lists become JSON.

    Example:
        >>> flat({"solver": {"lr": 0.1}, "name": "dcn"})
        {'solver.lr': '0.1', 'name': 'dcn'}
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


class Sinks:
    """Writes each row to several sinks; closes all of them, even if one raises."""

    def __init__(self, sinks: Sequence[Any]) -> None:
        self.sinks = list(sinks)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row to all sinks."""
        for sink in self.sinks:
            sink.write(row)

    def close(self) -> None:
        """Close all sinks, then raise the first error."""
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
