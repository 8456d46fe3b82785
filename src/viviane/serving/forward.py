"""A module's forward pass, from a batch on its device to predictions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.embedding.module_parts import collections_of
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision


class Forward:
    """Computes what `Model.predict` computes; called without autograd, by one thread at a time.

    Args:
        module: in eval mode.
        device: of the module.
    """

    def __init__(self, module: nn.Module, objective: Objective, precision: Precision, device: torch.device) -> None:
        self.device = device
        self._module, self._objective, self._precision = module, objective, precision
        self._collections = list(collections_of(module).values())

    def __call__(self, batch: Batch) -> Tensor:
        """Return predictions, (B, L), float32, on the device."""
        with self._precision.context(self.device):
            output = self._module(batch)
        return self._objective.predictions(output, batch.size)

    @property
    def sigmoid_shift(self) -> float | None:
        """See `Objective.sigmoid_shift`."""
        return self._objective.sigmoid_shift

    def predictions(self, output: Tensor) -> Tensor:
        """Return the predictions of what the module returned, (B, L), float32."""
        return self._objective.predictions(output, len(output))

    def write(self, batch: Batch, out: Tensor, flag: Tensor | None) -> None:
        """Write what a call returns, (B, L), float32, by the last kernel of the forward pass.

        Args:
            flag: (1,), int64, set if a key was invalid; None if it is not needed.
        """
        with self._precision.context(self.device):
            output = self._module(batch)
        self._objective.write_predictions(output, out, self.key_records() if flag is not None else (), flag)

    def key_records(self) -> list[Tensor]:
        """Return the records that captured lookups write; the first number is 0 until a key is wrong."""
        return [record for one in self._collections for record in one.key_records()]

    def check(self) -> None:
        """Raise what lookups on a GPU have found."""
        for collection in self._collections:
            collection.check()
