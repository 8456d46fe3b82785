"""Rows of metrics that `fit` writes: the mean training loss since the last row, and evaluation results."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from viviane.core.logging import get_logger
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.run_folder import RunFolder
from viviane.training.trackers import Sinks
from viviane.training.trainer_base import TrainerBase

_log = get_logger("training")


class FitRows:
    """Accumulates losses on the device, and writes rows to the history, the run folder, trackers and the log.

    Args:
        trainer: the trainer that runs `fit`.
        folder: the run folder, if this process writes one.
    """

    def __init__(self, trainer: TrainerBase, folder: RunFolder | None) -> None:
        self.trainer, self.folder = trainer, folder
        self.events: Sinks | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=trainer.device)
        self._loss_rows = 0
        self._last_step, self._last_time = trainer.step, perf_counter()
        self._seconds_before, self._started = 0.0, perf_counter()

    def add(self, loss: Tensor, rows: int) -> None:
        """Add the loss of a step with this number of rows, without synchronizing with the device."""
        self._loss_sum.add_(loss, alpha=rows)
        self._loss_rows += rows

    def pause(self, seconds: float) -> None:
        """Exclude the time of an evaluation or a checkpoint from the training rate."""
        self._last_time += seconds

    def write_train(self, epoch: int) -> None:
        """Write the mean loss over the rows since the previous training row; only here the loss is read."""
        if not self._loss_rows:
            return
        trainer = self.trainer
        trainer.settle()  # raises if a step failed, before its loss is written
        now = perf_counter()
        loss = float(self._loss_sum) / self._loss_rows
        rows = (trainer.step - self._last_step) * trainer.solver.batch_size
        self.write("train", epoch, {"loss": loss}, rows / max(now - self._last_time, 1e-9))
        self._loss_sum.zero_()
        self._loss_rows, self._last_step, self._last_time = 0, trainer.step, now

    def write(self, split: str, epoch: int, values: dict[str, float], rate: float) -> None:
        """Write a row.

        Args:
            split: "train" or "valid".
            epoch: epoch of the reader.
            values: metrics by name.
            rate: samples per second.
        """
        trainer = self.trainer
        row = {
            "step": trainer.step,
            "epoch": epoch,
            "split": split,
            **values,
            "lr": trainer.learning_rate(max(1, trainer.step)),
            "samples_per_second": round(rate, 1),
            "seconds": round(self._seconds(), 3),
        }
        trainer.history.rows.append(row)
        if self.folder is not None:
            self.folder.append(row)
        if self.events is not None:
            self.events.write(row)
        shown = " ".join(f"{name} {value:.6g}" for name, value in values.items())
        _log.info("step %d %s: %s (%.0f samples/s)", trainer.step, split, shown, rate)

    def _seconds(self) -> float:
        return self._seconds_before + perf_counter() - self._started

    def state(self, place: Progress) -> dict[str, float]:
        """Add the sum of losses to the tensors of a checkpoint, and return the counts to store with it."""
        place.tensors["loss_sum"] = self._loss_sum
        return {"loss_rows": self._loss_rows, "seconds": self._seconds()}

    def restore(self, place: Progress) -> None:
        """Continue from a checkpoint."""
        loop = place.values["loop"]
        self._loss_sum.copy_(place.tensors["loss_sum"])
        self._loss_rows, self._last_step, self._seconds_before = loop["loss_rows"], self.trainer.step, loop["seconds"]
