"""Experiment trackers: the rows of a run as they come, in MLflow, Weights & Biases or TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from viviane.core.errors import ConfigError, suggest
from viviane.core.optional import require

_NOT_CURVES: Final = {"step", "epoch", "split"}
_LONGEST_PARAMETER: Final = 500  # of MLflow's stores


@runtime_checkable
class Tracker(Protocol):
    """What `fit(tracker=...)` takes: told of the start, of each row of metrics, and of the end."""

    def start(self, name: str, settings: Mapping[str, Any], step: int) -> None:
        """Begin a run.

        Args:
            name: of the model.
            settings: of the run, as config.json holds them.
            step: at which it begins; above 0 on a resume.
        """

    def write(self, row: Mapping[str, Any]) -> None:
        """Take a row: step, epoch, split, and figures by name."""

    def close(self) -> None:
        """End the run; called after errors, too."""


class MlflowTracker:
    """Writes to an MLflow server or store.

    A run that is active already is used and stays open; else one is started and ended.

    Args:
        experiment: its name; None takes MLflow's active one.
        uri: of the server or store, such as "sqlite:///runs.db"; None takes MLflow's own setting.
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
        """Log the figures of a row as metrics such as "valid/auc"."""
        self._mlflow.log_metrics(curves(row), step=row["step"])

    def close(self) -> None:
        """End the run that was started here."""
        if self._mlflow is not None and self._own:
            self._mlflow.end_run()
            self._own = False


class WandbTracker:
    """Writes to Weights & Biases; offline with WANDB_MODE=offline or mode="offline".

    A run that is active already is used and stays open; else one is started and ended.

    Args:
        project: its name.
        mode: "online", "offline" or "disabled"; None takes W&B's own setting.
        folder: for its files; None takes W&B's own.
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
        """Log the figures of a row as metrics such as "valid/auc", over "step"."""
        self._run.log({**curves(row), "step": row["step"]})

    def close(self) -> None:
        """End the run that was started here."""
        if self._run is not None and self._own:
            self._run.finish()
        self._run = None


_KINDS: Final = {"mlflow": MlflowTracker, "wandb": WandbTracker}
NAMES: Final = ("mlflow", "tensorboard", "wandb")


def trackers_of(given: Any) -> tuple[list[Tracker], bool]:
    """Return trackers, and whether TensorBoard is among them, which the run folder keeps.

    Args:
        given: a name, a tracker, or several of either; None for nothing.

    Raises:
        ConfigError: an unknown name, or something that is no tracker.

    Example:
        >>> trackers_of("tensorboard")
        ([], True)
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [] if given is None else [given]
    found: list[Tracker] = []
    for one in several:
        if isinstance(one, str):
            if one not in NAMES:
                raise ConfigError("no such tracker", value=one, allowed=", ".join(NAMES), fix=suggest(one, NAMES))
            if one in _KINDS:
                found.append(_KINDS[one]())
        elif isinstance(one, Tracker) and not isinstance(one, type):
            found.append(one)
        else:
            allowed = f"{', '.join(NAMES)}, or an object with start, write and close"
            raise ConfigError("not a tracker", value=repr(one)[:80], allowed=allowed)
    return found, "tensorboard" in several


def curves(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite figures of a row by the names of their curves.

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
    """Return nested settings as one level of texts; lists as JSON.

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
    """Writes each row to several places; closes all of them, whatever one of them raises."""

    def __init__(self, sinks: Sequence[Any]) -> None:
        self.sinks = list(sinks)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row everywhere."""
        for sink in self.sinks:
            sink.write(row)

    def close(self) -> None:
        """Close everything; the first error is raised in the end."""
        errors: list[Exception] = []
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
