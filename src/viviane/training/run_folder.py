"""The folder of a run: settings, schema, metrics, times, checkpoints; text files that can be compared with diff.

runs/mine/
    config.json             settings, versions
    schema.json             the columns
    data_info.json          free-form statistics of the training set, if it has any
    metrics.jsonl           one row of metrics per line
    stages.json             seconds per stage
    tiers.json              tables in tiers: their place, hits and bytes by tier
    valid_histogram.json    calibration and curves at the last evaluation
    machine.json            machine, library versions, start, seconds and peak memory of each fit
    tensorboard/            events, if tensorboard is installed
    checkpoints/            step-00001000/, ..., index.json
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import torch

from viviane.core import machine
from viviane.core.errors import ConfigError, VivianeError
from viviane.core.file_names import refuse_links
from viviane.core.files import write_bytes_atomic, write_json_atomic
from viviane.core.json_files import read_json_object
from viviane.core.locks import locked
from viviane.schema import Schema
from viviane.training.history import finite_or_none

METRICS_FILE: Final = "metrics.jsonl"
_WRITTEN_INTO: Final = (METRICS_FILE, "checkpoints", "model", "snapshot", "tensorboard")
"""Entries of a run folder that a job appends to, or whose content it removes; others it replaces."""
CONFIG_FILE: Final = "config.json"
MACHINE_FILE: Final = "machine.json"
TIERS_FILE: Final = "tiers.json"


class RunFolder:
    """Writes the files of one run.

    Args:
        path: the folder; `start` creates it.

    Example:
        >>> RunFolder("runs/none").holds_a_run
        False
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def holds_a_run(self) -> bool:
        """Whether the folder contains a row of metrics or a checkpoint; otherwise there is nothing to lose."""
        metrics = self.path / METRICS_FILE
        return (metrics.exists() and metrics.stat().st_size > 0) or any(self.checkpoints.glob("step-*"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run folder for a block: only one job at a time may write to it.

        Raises:
            ConfigError: another process holds the lock; names it. Or what the job would write to or remove is a link to
                what is outside of the folder; the folder itself may be a link.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            refuse_links(self.path, _WRITTEN_INTO, ConfigError)
            refuse_links(self.checkpoints, error=ConfigError)
            yield

    def refuse_run(self) -> None:
        """Refuse a folder that holds a run.

        Raises:
            ConfigError: the folder holds a run.
        """
        if self.holds_a_run:
            raise ConfigError(
                "the run folder already holds a run",
                where=str(self.path),
                fix="continue it with resume=True, or choose another folder",
            )

    def start(
        self,
        config: Mapping[str, Any],
        schema: Schema,
        data_info: Mapping[str, Any],
        files: Mapping[str, Any] | None = None,
    ) -> None:
        """Write settings and schema.

        Args:
            config: configuration of the run.
            schema: schema of its data.
            data_info: statistics of the training data.
            files: additional JSON files, by name.
        """
        write_json_atomic(self.path / CONFIG_FILE, dict(config))
        schema.save(self.path)
        if data_info:
            write_json_atomic(self.path / "data_info.json", dict(data_info))
        for name, content in (files or {}).items():
            write_json_atomic(self.path / name, content)

    def rewrite_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Rewrite metrics.jsonl: empty at the start, up to the checkpoint on a resume."""
        write_bytes_atomic(self.path / METRICS_FILE, "".join(map(_line, rows)).encode())

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl."""
        file = self.path / METRICS_FILE
        try:
            with file.open("a", encoding="utf-8") as handle:
                handle.write(_line(row))
        except OSError as error:
            raise VivianeError(
                "a row of metrics could not be written",
                where=str(file),
                value=str(error),
                fix="free disk space, then resume=True continues from the last checkpoint",
            ) from error

    def write_stages(self, seconds: Mapping[str, float]) -> None:
        """Write seconds per stage; a step counts either as a replay, or by forward, backward and update."""
        spent = {name: round(value, 6) for name, value in seconds.items() if value or name != "replay"}
        write_json_atomic(self.path / "stages.json", spent)

    def write_tiers(self, counts: Mapping[str, Any]) -> None:
        """Write what the tiers of tables have counted; nothing where all tables are in memory."""
        if counts:
            write_json_atomic(self.path / TIERS_FILE, dict(counts))

    def write_machine(self, started: datetime, seconds: float, *, resumed: bool) -> None:
        """Write machine and versions, and add a fit: its start, its seconds, the peak memory of the process."""
        file = self.path / MACHINE_FILE
        fits: list[Any] = []
        if resumed and file.exists():
            before = read_json_object(file)
            fits = before["fits"] if isinstance(before.get("fits"), list) else []
        fit = {"started": started.isoformat(timespec="seconds"), "seconds": round(seconds, 3), **_peaks()}
        content = {"machine": machine.describe(), "versions": _versions(), "fits": [*fits, fit]}
        write_json_atomic(file, content)

    def write_histogram(self, histogram: Mapping[str, Any]) -> None:
        """Write the calibration bins of an evaluation."""
        write_json_atomic(self.path / "valid_histogram.json", dict(histogram))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **machine.versions("viviane", "torch", "numpy", "pyarrow", "numba")}
    return {name: version for name, version in found.items() if version is not None}


def _peaks() -> dict[str, int]:
    """Return peak memory in bytes: of this process on the host, and of torch on its GPU."""
    found = {}
    if sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["peak_gpu_memory_bytes"] = torch.cuda.max_memory_allocated()
    return found


def hold_folder(folder: RunFolder, stack: ExitStack) -> None:
    """Lock a run folder until `stack` is closed; rank 0 holds the lock for all processes."""
    stack.enter_context(folder.held())


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(finite_or_none(row), ensure_ascii=False, allow_nan=False) + "\n"
