"""One training step: forward, loss, backward, guard, clip, update."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor, nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer, Solver
from viviane.core.errors import ConfigError
from viviane.optim import DenseOptimizer, LearningRateSchedule, build_dense_optimizer
from viviane.training.average import WeightMean
from viviane.training.dense_state import collections_of, dense_parameters
from viviane.training.guard import NanGuard
from viviane.training.objective import Objective
from viviane.training.precision import Precision
from viviane.training.stages import StageTimes


class TrainStep:
    """Moves all weights of a module by one batch.

    Dense parameters follow the optimizer's settings; each embedding collection follows its own, which it was
    built with. All of them share the schedule, and the clipping factor

        c = min(1, clip_grad_norm / ||g||),     ||g||^2 = sum over dense gradients and distinct rows' gradients

    Args:
        module, objective, solver, device: what is trained, and how.
        optimizer: settings of the dense optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        solver: Solver,
        optimizer: AnyOptimizer,
        device: torch.device,
    ) -> None:
        self.module = module
        self.objective = objective
        self.solver = solver
        self.device = device
        self.collections = collections_of(module)
        self.parameters = dense_parameters(module)
        self.schedule = LearningRateSchedule(solver)
        self.optimizer: DenseOptimizer | None = None
        if self.parameters:
            self.optimizer = build_dense_optimizer(optimizer, self.parameters.values(), solver.lr)
        elif not self.collections:
            raise ConfigError("the module has neither parameters nor embedding tables", value=type(module).__name__)
        self.guard = NanGuard(module, self.collections) if solver.nan_guard else None
        self.stages = StageTimes()
        self.mean: WeightMean | None = None
        for collection in self.collections.values():
            for storage in collection.all_storages():
                storage.row_mean = None  # of an earlier trainer

    def __call__(self, batch: Batch, step: int, precision: Precision, lr: float | None = None) -> Tensor:
        """Train on one batch and return its loss, detached, on the device.

        Args:
            batch: on the device.
            step: the number of this step, from 1.
            precision: of the dense layers.
            lr: a learning rate instead of the schedule's.

        Raises:
            NumericsError: NaN or infinite input, loss or gradients; no weight has been changed.
            KeyRangeError: a key out of range; no weight has been changed.
        """
        times, start = self.stages, perf_counter()
        try:
            if self.guard is not None:
                self.guard.before(batch, step)
            loss = self._forward(batch, precision)
            if self.guard is not None:
                self.guard.check_loss(loss, batch, step)
            middle = perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            end = perf_counter()
            if self.guard is not None:
                self.guard.check_gradients(loss, batch, step)
            for collection in self.collections.values():
                collection.check()
            scale = self._clip_scale()
        except BaseException:
            self._discard()
            if self.guard is not None:
                self.guard.restore_buffers()
            raise
        self._update(scale, step, lr)
        times.add("forward", middle - start)
        times.add("backward", end - middle)
        times.add("update", perf_counter() - end)
        return loss.detach()

    def forward_backward(self, batch: Batch, precision: Precision) -> None:
        """Run forward and backward and leave the gradients; for timing."""
        self._forward(batch, precision).backward()  # type: ignore[no-untyped-call]

    def _forward(self, batch: Batch, precision: Precision) -> Tensor:
        with precision.context(self.device):
            output = self.module(batch)
        loss = self.objective.loss(output, batch)
        if not loss.requires_grad:
            raise ConfigError(
                "the loss does not depend on anything that is trained",
                where=type(self.module).__name__,
                fix="unfreeze a parameter or a table, and let the module's output come from it",
            )
        penalty = self.objective.penalty(self.parameters.values(), batch.size)
        return loss if penalty is None else loss + penalty

    def _clip_scale(self) -> float | Tensor:
        limit = self.solver.clip_grad_norm
        if limit is None:
            return 1.0
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        squares = [one.grad_norm_squared().double() for one in self.collections.values()]
        if gradients:
            squares.append(torch.stack(torch._foreach_norm(gradients)).double().square().sum())
        norm = torch.stack(squares).sum().sqrt()
        scale = (limit / norm).clamp(max=1.0).to(torch.float32)
        return float(scale) if self.device.type == "cpu" else scale  # a GPU is not made to wait for the number

    def _update(self, scale: float | Tensor, step: int, lr: float | None) -> None:
        rate = self.schedule.lr(step) if lr is None else lr
        factor = rate / self.solver.lr
        if self.solver.ema_decay is not None and self.mean is None:
            self.mean = WeightMean(self.module, self.solver.ema_decay)
        if self.mean is not None:
            self.mean.advance()
        if self.optimizer is not None:
            if isinstance(scale, Tensor) or scale != 1.0:
                gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
                torch._foreach_mul_(gradients, scale)
            self.optimizer.set_lr(rate, factor)
            self.optimizer.step()
        for collection in self.collections.values():
            collection.step(rate, scale, factor)
        if self.mean is not None:
            self.mean.follow()
        self.module.zero_grad(set_to_none=True)

    def _discard(self) -> None:
        self.module.zero_grad(set_to_none=True)
        for collection in self.collections.values():
            collection.discard_gradients()
