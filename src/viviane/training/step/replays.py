"""The interface of replays of captured steps, and the replays of a device that has none."""

from __future__ import annotations

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.training.step.precision import Precision


class Replays:
    """Replays of captured training steps. This base class replays nothing: every step runs eagerly.

    Attributes:
        can_replay: whether `TrainStep` calls this object in every step.
        reason: why steps are not captured; None if they are or will be.
        shape_mismatch_reason: why the last batch may have other shapes on another rank; None if it cannot.
        num_captured: batch shapes captured since weights, modes or the optimizer's state last changed.
        num_replays: number of replayed steps.
        rolled_back: steps that the last error rolled back: they were counted, but updated nothing.
        has_updated: whether an eager step has updated weights since graphs were last dropped.

    Example:
        >>> Replays().describe()
        'eager: no GPU: training runs on cpu'
    """

    can_replay = False
    reason: str | None = "no GPU: training runs on cpu"
    shape_mismatch_reason: str | None = None
    num_captured = 0
    num_replays = 0
    rolled_back = 0
    has_updated = False

    @classmethod
    def without_gpu(cls, device: torch.device, setting: bool | str) -> Replays:
        """Return the replays of a device without CUDA graphs.

        Args:
            device: device of the steps.
            setting: `solver.cuda_graph`.

        Raises:
            ConfigError: the setting requires a CUDA graph.
        """
        none = cls()
        none.reason = "solver.cuda_graph is False" if setting is False else f"no GPU: training runs on {device}"
        if setting is True:
            raise refusal(none.reason)
        return none

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None) -> Tensor | None:
        """Train on a batch by a replay and return its loss; None: the caller runs the eager step.

        Raises:
            NumericsError, KeyRangeError, DataError: an earlier replay failed; see `rolled_back`.
        """
        return None

    def describe(self) -> str:
        """Return in one line whether steps are replayed, or why not."""
        return f"eager: {self.reason}"

    def wait_all(self) -> None:
        """Wait for all replays in flight, and raise if one failed.

        Raises:
            NumericsError, KeyRangeError, DataError: neither that step nor a later one changed a weight.
        """

    def drop_graphs(self) -> None:
        """Drop all graphs, on all ranks, after a checkpoint was loaded."""

    def release(self) -> None:
        """Drop all graphs without reading the status of their steps."""


def refusal(reason: str) -> ConfigError:
    """Return the error for `solver.cuda_graph=True` if steps cannot be captured."""
    return ConfigError(
        "the training step cannot be captured in a CUDA graph", where="solver.cuda_graph", value=reason,
        fix="set cuda_graph='auto', which gives the same results without a graph, or remove the cause",
    )  # fmt: skip
