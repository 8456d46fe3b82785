"""Horovod's optimizer and callbacks of Keras, over torch.distributed, for machines without Horovod."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from viviane.core.errors import ConfigError
from viviane.tensorflow import horovod
from viviane.tensorflow.arguments import pairs_of
from viviane.tensorflow.horovod import Average, allreduce, broadcast_variables, size
from viviane.tensorflow.host_calls import plain_python, tensorflow
from viviane.tensorflow.optimizer import OptimizerWrapper
from viviane.tensorflow.table_variable import has_table


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: Any = None,
    *_: Any,
    op: Any = Average,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    **options: Any,
) -> Any:
    """Return an optimizer of the same class and settings that takes means of dense gradients over the processes.

    Gradients of tables are left as they are: they are summed over the processes, as SOK's are.

    Args:
        optimizer: of Keras, or a `sok.OptimizerWrapper` around one.
        name: no effect.
        op: of `allreduce`.
        sparse_as_dense: tf.IndexedSlices are sent as tensors.
        backward_passes_per_step: 1.
        options: of Horovod's, without effect here: compression, device_dense, groups, ...

    Raises:
        ConfigError: another optimizer, or several backward passes a step.
    """
    del name, options
    if backward_passes_per_step != 1:
        raise ConfigError("gradients are averaged in each step", where="DistributedOptimizer",
                          value=f"backward_passes_per_step={backward_passes_per_step}", allowed="1",
                          fix="add gradients up in the script")  # fmt: skip
    if isinstance(optimizer, OptimizerWrapper):
        inner = DistributedOptimizer(optimizer.optimizer, op=op, sparse_as_dense=sparse_as_dense)
        return optimizer.around(inner)
    found = tensorflow().keras.optimizers
    kinds = (found.Optimizer, *([found.legacy.Optimizer] if hasattr(found, "legacy") else []))
    if not isinstance(optimizer, kinds) or hasattr(optimizer, "inner_optimizer"):
        raise ConfigError(
            "not an optimizer of Keras", where="DistributedOptimizer", value=type(optimizer).__name__,
            allowed="tf.keras.optimizers, sok.OptimizerWrapper",
            fix="leave DistributedOptimizer out, and take gradients from hvd.DistributedGradientTape",
        )  # fmt: skip
    kind: Any = type(optimizer)
    return _averaging(kind, op, sparse_as_dense).from_config(optimizer.get_config())


@cache
def _averaging(base: Any, op: Any, sparse_as_dense: bool) -> Any:
    """Return a subclass of an optimizer's class, of the same name, that averages before it applies."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        return base.apply_gradients(self, _averaged(grads_and_vars, op, sparse_as_dense), *args, **options)

    methods = {"apply_gradients": plain_python(apply_gradients), "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), methods)


def _averaged(grads_and_vars: Any, op: Any, sparse_as_dense: bool) -> list[tuple[Any, Any]]:
    tf = tensorflow()
    pairs = pairs_of(grads_and_vars)
    if size() == 1:
        return pairs
    out = []
    for gradient, variable in pairs:
        if gradient is not None and not has_table(variable):
            whole = tf.convert_to_tensor(gradient) if sparse_as_dense else gradient
            out.append((allreduce(whole, op=op), variable))
        else:
            out.append((gradient, variable))
    return out


# Callbacks -----------------------------------------------------------------------------------------------------------


def BroadcastGlobalVariablesCallback(root_rank: int = 0, device: str = "") -> Any:  # noqa: N802 - Horovod's name
    """Return a callback that gives the dense variables of one process to all after the first batch.

    Args:
        root_rank: that process.
        device: no effect.
    """
    del device
    return _callbacks()["broadcast"](root_rank)


def MetricAverageCallback(device: str = "") -> Any:  # noqa: N802 - Horovod's name
    """Return a callback that replaces what an epoch has logged by its mean over the processes.

    Args:
        device: no effect.
    """
    del device
    return _callbacks()["average"]()


def LearningRateScheduleCallback(  # noqa: N802 - Horovod's name
    initial_lr: float,
    multiplier: Callable[[float], float] | float,
    start_epoch: int = 0,
    end_epoch: int | None = None,
    staircase: bool = True,
    momentum_correction: bool = True,
    steps_per_epoch: int | None = None,
) -> Any:
    """Return a callback that sets the rate to initial_lr * multiplier(epoch) from one epoch to another.

    Args:
        initial_lr: the rate.
        multiplier: a number, or a function of the epoch; without `staircase` the epoch has a fraction for the batch.
        start_epoch, end_epoch: the first epoch, and the one after the last.
        staircase: set the rate once an epoch, and not at each batch.
        momentum_correction: no effect.
        steps_per_epoch: batches of an epoch; None: those that Keras counted.
    """
    del momentum_correction
    rate = multiplier if callable(multiplier) else lambda _: multiplier
    return _callbacks()["schedule"](initial_lr, rate, start_epoch, end_epoch, staircase, steps_per_epoch)


def LearningRateWarmupCallback(  # noqa: N802 - Horovod's name
    initial_lr: float,
    warmup_epochs: int = 5,
    momentum_correction: bool = True,
    steps_per_epoch: int | None = None,
    verbose: int = 0,
) -> Any:
    """Return a callback that raises the rate from initial_lr / processes to initial_lr.

    Args:
        initial_lr: the rate after the epochs.
        warmup_epochs: their number.
        momentum_correction, verbose: no effect.
        steps_per_epoch: batches of an epoch; None: those that Keras counted.
    """
    del verbose

    def multiplier(epoch: float) -> float:
        return (1 + epoch * (size() - 1) / warmup_epochs) / size()

    return LearningRateScheduleCallback(
        initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
    )


@cache
def _callbacks() -> dict[str, Any]:
    """Return the classes of the callbacks, which are made when TensorFlow is imported."""
    keras = tensorflow().keras

    class Broadcast(keras.callbacks.Callback):  # type: ignore[name-defined]
        def __init__(self, root_rank: int) -> None:
            super().__init__()
            self.root_rank, self.done = root_rank, False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self.done:
                broadcast_variables(self.model.variables, self.root_rank)
                broadcast_variables(getattr(self.model.optimizer, "variables", []), self.root_rank)
                self.done = True

    class MetricAverage(keras.callbacks.Callback):  # type: ignore[name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for name in sorted(logs or {}):
                logs[name] = float(allreduce(tensorflow().constant(logs[name], "float64"), op=Average))

    class Schedule(keras.callbacks.Callback):  # type: ignore[name-defined]
        def __init__(
            self, initial: float, multiplier: Any, start: int, end: int | None, staircase: bool, steps: int | None
        ) -> None:
            super().__init__()
            self.initial, self.multiplier, self.staircase, self.steps = initial, multiplier, staircase, steps
            self.epochs, self.epoch = (start, end), 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            start, end = self.epochs
            if self.epoch < start or (end is not None and self.epoch >= end) or (self.staircase and batch):
                return
            steps = self.steps or self.params.get("steps")
            if not self.staircase and not steps:
                raise ConfigError("Keras does not know how many batches an epoch has",
                                  where="learning rate callback", fix="pass steps_per_epoch")  # fmt: skip
            part = 0.0 if self.staircase else batch / steps
            rate = float(self.initial * self.multiplier(self.epoch + part))
            own = self.model.optimizer.learning_rate
            if hasattr(own, "assign"):
                own.assign(rate)
            else:
                self.model.optimizer.learning_rate = rate

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if logs is not None:
                logs["lr"] = float(self.model.optimizer.learning_rate)

    return {"broadcast": Broadcast, "average": MetricAverage, "schedule": Schedule}


def modules() -> dict[str, ModuleType]:
    """Return what `import horovod`, `horovod.tensorflow`, `horovod.tensorflow.keras` and parts of them find."""
    public = {name: one for name, one in vars(horovod).items() if not name.startswith("_")}
    callbacks = {one.__name__: one for one in (BroadcastGlobalVariablesCallback, MetricAverageCallback,
                                               LearningRateScheduleCallback, LearningRateWarmupCallback)}  # fmt: skip
    listed = _module("horovod.tensorflow.keras.callbacks", callbacks)
    keras = _module(
        "horovod.tensorflow.keras", public | {"DistributedOptimizer": DistributedOptimizer, "callbacks": listed}
    )
    own = _module("horovod.tensorflow", public | {"DistributedOptimizer": DistributedOptimizer, "keras": keras})
    parent = _module("horovod", {"tensorflow": own, "keras": keras})
    return {
        "horovod": parent, "horovod.tensorflow": own, "horovod.tensorflow.keras": keras,
        "horovod.tensorflow.keras.callbacks": listed, "horovod.tensorflow.compression": horovod.compression,
        "horovod.keras": keras, "horovod.keras.callbacks": listed,
    }  # fmt: skip


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made
