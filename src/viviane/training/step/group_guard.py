"""The NaN guard of a process group: a failure on one rank stops all ranks with the same message."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import NumericsError
from viviane.core.ranges import timed_as
from viviane.training.step.guard import FIX, NanGuard, all_finite, bad_input, numbers_of, some
from viviane.training.step.step_sync import StepSync


class GroupGuard(NanGuard):
    """Checks a step as `NanGuard` does; all ranks decide together.

    The loss is checked after backward, because all ranks take part in the collectives of backward. All ranks search for
    the cause together, because a forward pass has collectives too.

    Args:
        sync: synchronization of the ranks; `before` begins its step.
    """

    sync: StepSync
    local_sums: Tensor
    """Finite if this rank's dense gradients were, before they were summed over the group."""

    def before(self, batch: Batch, step: int) -> None:
        """Save the buffers and agree on the size of the global batch; on the CPU, check the input."""
        self.save_buffers()
        is_bad = batch.device.type == "cpu" and not all_finite(numbers_of(batch))
        if self.sync.begin(batch, is_bad=is_bad):
            what = f"the batch contains NaN or infinite values: {'; '.join(bad_input(batch))}" if is_bad else ""
            self._refuse_together(what, step, batch)

    @timed_as("check values")
    def check_loss(self, loss: Tensor, batch: Batch, step: int) -> None:
        """Do nothing: the loss is checked after backward."""

    @timed_as("check values")
    def check_gradients(self, loss: Tensor, batch: Batch, step: int) -> None:
        """Check this rank's loss, dense gradients and row gradients, and agree on the result."""
        features = [name for one in self.collections.values() for name in one.nonfinite_gradients()]
        flags = torch.isfinite(torch.stack([loss.detach(), self.local_sums.to(loss.dtype)])).tolist()
        group = self.sync.group
        every = group.gather_numbers([int(not flags[0]), int(not flags[1]), len(features)])
        if not any(any(one) for one in every):
            return
        if any(one[0] for one in every):
            self._refuse_losses(loss, batch, step, is_bad=not flags[0])
        # The sum of finite values may overflow, so the values themselves decide.
        names = [f"feature {name!r}" for name in features]
        for name, gradient in self.gradients.named().items():
            if not bool(torch.isfinite(gradient).all()):
                names.append(f"parameter {name!r}")
        if any(one[0] for one in group.gather_numbers([len(names)])):
            mine = bool(features) or not flags[1]
            self._refuse_together(f"gradients are NaN or infinite: those of {some(names)}" if mine else "", step, batch)

    def _refuse_losses(self, loss: Tensor, batch: Batch, step: int, *, is_bad: bool) -> NoReturn:
        self.restore_buffers()
        output = self.bad_output(batch)  # on every rank, because it runs forward
        found = bad_input(batch) or self.bad_weights() or output
        cause = "; ".join(found) or "input, weights and all layers' outputs are finite; the source is the loss function"
        words = f"the loss is {float(loss.detach())}: {cause}" if is_bad else ""
        # Batch statistics spread a NaN to all ranks: its source is the rank that found it earliest in forward.
        self._refuse_together(words, step, batch, place=0 if bad_input(batch) else self.num_looked_at)

    def _refuse_together(self, what: str, step: int, batch: Batch, place: int = 0) -> NoReturn:
        every = self.sync.group.gather_data([what, batch.origin, place])
        guilty = [rank for rank, one in enumerate(every) if one[0]] or [0]
        first = min(every[rank][2] for rank in guilty)
        bad = [rank for rank in guilty if every[rank][2] == first]
        words, origin, _ = every[bad[0]]
        ranks = f"rank {bad[0]}" if len(bad) == 1 else f"ranks {', '.join(map(str, bad))}; of rank {bad[0]}"
        error = NumericsError(
            f"{ranks}: {words or 'gradients are NaN or infinite'}", where=f"step {step}, {origin}", fix=FIX
        )
        raise self.sync.group.mark_reported(error)
