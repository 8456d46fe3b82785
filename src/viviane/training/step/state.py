"""The state of a training step: module, tables, gradients, optimizer, and the policies around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from viviane.batch import Batch
from viviane.config import AnyOptimizer, Solver
from viviane.core.errors import ConfigError
from viviane.core.locations import AnyPath
from viviane.embedding.module_parts import collections_of, dense_parameters
from viviane.ops.dense_update import reason as dense_reason
from viviane.ops.rules import Rule, rule_of
from viviane.optim import DenseOptimizer, LearningRateSchedule, build_dense_optimizer
from viviane.optim.dense import DenseGradients, DenseMover
from viviane.parallel import Group, ShardedCollection
from viviane.training.checkpoint.load import load_checkpoint
from viviane.training.checkpoint.saved_table import Progress
from viviane.training.profiling.stages import StageTimes
from viviane.training.step.average import WeightMean
from viviane.training.step.batch_norm import join_batch_statistics
from viviane.training.step.dense_exchange import DenseExchange, in_order_of_use
from viviane.training.step.group_guard import GroupGuard
from viviane.training.step.guard import NanGuard
from viviane.training.step.loss_scale import LossScale
from viviane.training.step.objective import Objective
from viviane.training.step.precision import Precision
from viviane.training.step.replays import Replays
from viviane.training.step.step_sync import StepSync, check_collections, share_first_weights


class StepHook(Protocol):
    """Work around the lookups of a step, such as that of a cache of table rows. Steps with hooks run eagerly."""

    def before_lookup(self, batch: Batch, step: int) -> None:
        """Called when the batch has been checked, before the forward pass looks rows up."""
        ...

    def after_update(self, batch: Batch, step: int) -> None:
        """Called when all weights have been updated; not called for a step that is skipped."""
        ...


class StepState:
    """The parts of a training step.

    Args:
        module, objective, solver, device: see `Trainer`.
        optimizer: settings of the dense optimizer.
        group: the ranks that train together; None: this process only.

    Attributes:
        guard, sync, exchange, loss_scale, mean: the NaN guard, the agreement of ranks, the sums of dense gradients, the
            loss scale of fp16 and the running mean of weights; None if the solver or the group does not need them.
        num_rows: rows of the last global batch.
        dynamic_shape_reason: why batch shapes are dynamic, in a group; None if they are static.
        one: 1.0 on the device, from which backward begins.
        hooks: called in every step, in order.
        captured: replays of captured steps. The trainer sets it on a GPU.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        solver: Solver,
        optimizer: AnyOptimizer,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        check_collections(module, self.group)
        join_batch_statistics(module, self.group)
        self.module, self.objective, self.solver, self.device = module, objective, solver, device
        self.collections = collections_of(module)
        self.parameters = dense_parameters(module)
        self.gradients = DenseGradients(self.parameters)
        self.schedule = LearningRateSchedule(solver)
        self.optimizer = self._build_optimizer(optimizer)
        self.guard = NanGuard(module, self.collections, self.gradients) if solver.nan_guard else None
        self.sync: StepSync | None = None
        self.exchange: DenseExchange | None = None
        self.num_rows = 0
        self.dynamic_shape_reason: str | None = "trainer.fix_sizes was not called"
        if self.group.size > 1:
            self._join()
        if solver.precision != "auto":
            Precision(solver.precision).check(device)
        self.loss_scale = LossScale(solver.loss_scale) if solver.precision == "fp16" else None
        self.one = torch.ones((), device=device)
        self.stages = StageTimes()
        self.mean: WeightMean | None = None
        self.hooks: list[StepHook] = []
        for collection in self.collections.values():
            for storage in collection.all_storages():
                storage.row_mean = None  # left by an earlier trainer
        self.captured = Replays()

    def rate(self, step: int, lr: float | None) -> float:
        """Return the learning rate of a step: the schedule's unless one is given.

        Raises:
            ConfigError: it is 0, and a rule divides by it.
        """
        rate = self.schedule.lr(step) if lr is None else lr
        if rate == 0 and (names := [rule.name for rule in self._rules() if rule.divides_by_rate]):
            raise ConfigError(
                f"{names[0].upper()} divides by the learning rate, which is 0", where=f"step {step}",
                fix="set end_lr of the solver above 0; the weights of this rule become 0 with the rate",
            )  # fmt: skip
        return rate

    def _rules(self) -> list[Rule]:
        """Return the rules of dense weights and of tables."""
        own: list[Rule] = [] if self.optimizer is None else [self.optimizer.rule]
        for collection in self.collections.values():
            own += [rule_of(table.optimizer or collection.optimizer) for table in collection.tables.values()]
        return own

    def _build_optimizer(self, settings: AnyOptimizer) -> DenseOptimizer | None:
        if not self.parameters:
            if not self.collections:
                raise ConfigError(
                    "the module has neither parameters nor embedding tables", value=type(self.module).__name__
                )
            return None
        optimizer = build_dense_optimizer(settings, self.parameters.values(), self.solver.lr)
        optimizer.beside = self.gradients.wire_gradients
        if dense_reason(list(self.parameters.values())) is None:
            optimizer.mover = DenseMover()
        return optimizer

    def _join(self) -> None:
        """Prepare to train with other ranks."""
        share_first_weights(self.module, self.group)
        self.sync = StepSync(self.group)
        wire = self.solver.dense_wire_dtype
        self.exchange = DenseExchange(
            in_order_of_use(self.parameters),
            self.group,
            None if wire == "float32" else getattr(torch, wire),
            self.gradients.wire_gradients,
            uses_peers=self.solver.peer_memory is not False,
        )
        if self.guard is not None:
            self.guard = GroupGuard(self.module, self.collections, self.gradients)
            self.guard.sync = self.sync

    def fix_sizes(self, rows: int | None, hotness: Mapping[str, int] | None = None) -> None:
        """Set the static shape of training batches, with the same arguments on all ranks; None: dynamic shapes.

        Args:
            rows: rows of every local batch.
            hotness: ids per row, by bag column; see `ShardedCollection.fix_sizes`.
        """
        if self.sync is None or self.exchange is None:
            return
        if rows is None:
            self.sync.clear_static_shape()
        else:
            self.dynamic_shape_reason = None
            self.sync.set_static_shape(rows, self.exchange, hotness)
        for collection in self.collections.values():
            if isinstance(collection, ShardedCollection):
                names = collection.features.keys()
                own = {name: count for name, count in (hotness or {}).items() if name in names}
                collection.fix_sizes(rows, own)

    def load(self, folder: str | AnyPath, *, weights_only: bool = False) -> Progress:
        """Load a checkpoint into the module and the optimizers, and return the saved position in training.

        Raises:
            CheckpointError: see `viviane.training.checkpoint.load.load_checkpoint`.
        """
        place = load_checkpoint(
            folder, self.module, optimizer=self.optimizer, weights_only=weights_only, group=self.group
        )
        self.captured.drop_graphs()
        return place

    def scaling(self) -> dict[str, list[float]]:
        """Return the loss scale's state for a checkpoint: {"loss_scale": ...} in fp16."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    def take_scaling(self, values: Mapping[str, Any]) -> None:
        """Restore the loss scale of a checkpoint, if it has one."""
        if self.loss_scale is not None:
            self.loss_scale.restore(values.get("loss_scale"))

    def discard(self) -> None:
        """Drop all gradients of a step that does not update weights."""
        if self.exchange is not None:
            self.exchange.drop()
        self.gradients.drop()
        for collection in self.collections.values():
            collection.discard_gradients()

    def roll_back(self) -> None:
        """Undo a step that does not update weights: drop its gradients, and restore batch statistics."""
        self.discard()
        if self.guard is not None:
            self.guard.restore_buffers()
