"""HugeCTR's solver, optimizer and learning-rate schedule."""

from __future__ import annotations

import inspect
import math
import random
from numbers import Real
from typing import Any, ClassVar, Final

import torch

import viviane.config as settings
from viviane.compat.hugectr.argument_types import typed, typed_methods
from viviane.compat.hugectr.arguments import Arguments, Signature, note, say
from viviane.compat.hugectr.enums import AllReduceAlgo, DeviceLayout, LrPolicy_t, MetricsType, Optimizer_t, Update_t
from viviane.compat.hugectr.processes import group, num_processes, shared_device
from viviane.core.errors import ConfigError
from viviane.optim import LearningRateSchedule

_OVERLAPS = (
    "train_intra_iteration_overlap", "train_inter_iteration_overlap", "eval_intra_iteration_overlap",
    "eval_inter_iteration_overlap", "async_mlp_wgrad", "overlap_lr", "overlap_init_wgrad", "overlap_ar_a2a",
    "use_holistic_cuda_graph", "use_overlapped_pipeline", "is_dlrm", "enable_tf32_compute", "grouped_all_reduce",
    "perf_logging",
)  # fmt: skip


_CALLBACK_METHODS: Final = {"on_training_start": 0, "on_training_end": 1, "on_eval_start": 1, "on_eval_end": 2}
"""How many arguments fit gives to the methods of a callback."""


def _takes(method: Any, count: int) -> bool:
    """Whether a method can be called with so many arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except TypeError:  # also raised for what cannot be called
        return False
    except ValueError:  # a function that was compiled may have no signature
        return callable(method)
    return True


def _check_callback(callback: Any) -> None:
    for name, count in _CALLBACK_METHODS.items():
        method = getattr(callback, name, None)
        fits = not isinstance(callback, type) and method is not None and _takes(method, count)
        if not fits:
            raise ConfigError(
                "a callback must be an object with the methods of TrainingCallback",
                where=f"CreateSolver, training_callbacks, {name} with {count} argument(s)", value=callback,
                fix="derive its class from hugectr.TrainingCallback and pass an object of it",
            )  # fmt: skip


class Solver(Arguments):
    """The result of CreateSolver, with its arguments as attributes."""

    signature: ClassVar[Signature] = Signature(
        "CreateSolver",
        {
            "model_name": "", "seed": 0, "lr_policy": LrPolicy_t.fixed, "lr": 0.001, "warmup_steps": 1,
            "decay_start": 0, "decay_steps": 1, "decay_power": 2.0, "end_lr": 0.0, "max_eval_batches": 100,
            "batchsize_eval": 2048, "batchsize": 2048, "vvgpu": [[0]], "repeat_dataset": True,
            "use_mixed_precision": False, "scaler": 1.0, "metrics_spec": {MetricsType.AUC: 1.0},
            "i64_input_key": False, "use_algorithm_search": True, "use_cuda_graph": True, "gen_loss_summary": True,
            "device_layout": DeviceLayout.LocalFirst, "use_embedding_collection": False,
            "all_reduce_algo": AllReduceAlgo.NCCL, "num_iterations_statistics": 20, "drop_incomplete_batch": True,
            "kafka_brockers": "", "training_callbacks": [], "data_source_params": None,
            **dict.fromkeys(_OVERLAPS, False),
        },
        speed=frozenset(
            {
                "use_algorithm_search", "use_cuda_graph", "gen_loss_summary", "device_layout", "all_reduce_algo",
                "num_iterations_statistics", "scaler", "use_embedding_collection", *_OVERLAPS,
            }
        ),
    )  # fmt: skip

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        given_metrics = dict(vars(self)["metrics_spec"])
        self.metrics_spec: dict[Any, Any] = {MetricsType.__members__.get(k, k): v for k, v in given_metrics.items()}
        for metric, limit in self.metrics_spec.items():
            if not isinstance(metric, MetricsType) or not isinstance(limit, Real) or math.isnan(limit):
                raise ConfigError(
                    "metrics_spec must map metrics to thresholds", where="CreateSolver", value=(metric, limit),
                    fix="write {hugectr.MetricsType.AUC: 0.8}",
                )  # fmt: skip
        for callback in self.training_callbacks:
            _check_callback(callback)

    def to_viviane(self) -> settings.Solver:
        """Return the settings of Viviane's trainer; the scheduler supplies the learning rate of each step."""
        precision: Any = "bf16" if self.use_mixed_precision else "fp32"
        if self.use_mixed_precision:
            say("Note: CreateSolver: use_mixed_precision computes dense layers in bfloat16, which needs no loss scale")
        return settings.Solver(
            batch_size=self.batchsize, eval_batch_size=self.batchsize_eval, lr=self.lr, precision=precision,
            seed=self.seed or group().from_first(lambda: random.SystemRandom().randrange(1, 2**31)),
            device=self.device(), init_output_bias=False,  # HugeCTR does not initialize it from the data
        )  # fmt: skip

    def device(self) -> str:
        """Return the device of a single process: the first device of vvgpu, or the CPU if there is no GPU."""
        wanted = [device for node in self.vvgpu for device in node]
        if not wanted:
            raise ConfigError("vvgpu has no device", where="CreateSolver", value=self.vvgpu, fix="write [[0]]")
        there, processes = torch.cuda.device_count(), num_processes()
        if processes > 1:
            if len(wanted) != processes:
                say(f"Warning: vvgpu {self.vvgpu}: {processes} processes of torchrun share each batch")
            return shared_device()
        if len(wanted) > 1 or wanted[0] >= max(there, 1):
            place = "GPU" if there else "CPU"
            say(f"Warning: vvgpu {self.vvgpu}: one process on one {place} trains on the complete batch")
        if not there:
            return "cpu"
        return f"cuda:{wanted[0]}" if wanted[0] < there else "cuda:0"

    def scheduler(self) -> LearningRateScheduler:
        """Return the schedule of the learning rate, at its start."""
        return LearningRateScheduler(
            self.lr, self.warmup_steps, self.decay_start, self.decay_steps, self.decay_power, self.end_lr
        )


@typed_methods
class LearningRateScheduler:
    """HugeCTR's learning rate schedule, one step at a time.

    Example:
        >>> schedule = LearningRateScheduler(1.0, warmup_steps=4)
        >>> schedule.get_next(), schedule.get_next(), schedule.get_step()
        (0.25, 0.5, 2)
    """

    @typed
    def __init__(
        self,
        base_lr: float,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
    ) -> None:
        self._schedule = LearningRateSchedule(
            settings.Solver(
                lr=base_lr, warmup_steps=max(1, warmup_steps), decay_start=decay_start,
                decay_steps=max(1, decay_steps), decay_power=decay_power, end_lr=end_lr,
            )
        )  # fmt: skip
        self._step = 0
        self._lr = base_lr

    def get_next(self) -> float:
        """Advance to the next step and return its learning rate."""
        self._step += 1
        self._lr = self._schedule.lr(self._step)
        return self._lr

    def get_lr(self) -> float:
        """Return the learning rate of the current step."""
        return self._lr

    def get_step(self) -> int:
        """Return the current step, 0 before the first."""
        return self._step


class OptParams(Arguments):
    """The result of CreateOptimizer."""

    signature: ClassVar[Signature] = Signature(
        "CreateOptimizer",
        {
            "optimizer_type": Optimizer_t.Adam, "update_type": Update_t.Global, "beta": 0.0, "lambda1": 0.0,
            "lambda2": 0.0, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7, "initial_accu_value": 0.0,
            "momentum_factor": 0.0, "atomic_update": True,
        },
        speed=frozenset({"atomic_update"}),
    )  # fmt: skip

    def to_dense(self) -> settings.AnyOptimizer:
        """Return the optimizer of dense weights."""
        return self._rule("local")

    def to_table(self) -> settings.AnyOptimizer:
        """Return the optimizer of an embedding collection's table, which updates only rows of the batch."""
        return self._rule("local")

    def to_sparse(self, *, static: bool, where: str) -> settings.AnyOptimizer:
        """Return the optimizer of a table.

        Args:
            static: the table has all its rows from the start, so that "Global" can update every one of them.
            where: location for messages.
        """
        update = {Update_t.Local: "local", Update_t.Global: "global"}.get(self.update_type, "lazy_global")
        if update == "global" and not static:
            if self.optimizer_type is Optimizer_t.Adam:
                update = "lazy_global"
                note(where, "Update_t.Global of Adam on keys without slot_size_array is computed as LazyGlobal")
            elif self.optimizer_type in (Optimizer_t.MomentumSGD, Optimizer_t.Nesterov) and self.momentum_factor:
                update = "local"
                say(
                    f"Warning: {where}: Update_t.Global of {self.optimizer_type.name} updates every row, but its "
                    "rows are not known in advance: rows of the batch are updated; set slot_size_array to update all"
                )
        return self._rule(update)

    def _rule(self, update: Any) -> settings.AnyOptimizer:
        match self.optimizer_type:
            case Optimizer_t.Adam:
                return settings.Adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, update=update)
            case Optimizer_t.AdaGrad:
                return settings.AdaGrad(initial_accumulator=self.initial_accu_value, epsilon=self.epsilon)
            case Optimizer_t.Ftrl:
                return settings.Ftrl(beta=self.beta, lambda1=self.lambda1, lambda2=self.lambda2)
            case Optimizer_t.SGD:
                return settings.SGD()
            case Optimizer_t.MomentumSGD | Optimizer_t.Nesterov:
                momentum = self.momentum_factor
                kept = "global" if update == "global" and momentum else "local"
                nesterov = self.optimizer_type is Optimizer_t.Nesterov and momentum > 0
                return settings.SGD(momentum=momentum, nesterov=nesterov, update=kept)
            case Optimizer_t.RMSProp:
                return settings.RMSProp(decay=self.beta or 0.9, epsilon=self.epsilon)
        raise ConfigError("unknown optimizer", where="CreateOptimizer", value=self.optimizer_type,
                          allowed=", ".join(one.name for one in Optimizer_t))  # fmt: skip
