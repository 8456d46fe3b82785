"""The learning-rate schedule, and the optimizer of dense parameters: a few calls update all parameters of a device.

It is an ordinary `torch.optim.Optimizer` around a rule of `viviane.ops.rules`, so that dense weights and embedding
tables follow the same arithmetic. Two formulas differ from torch.optim: epsilon is added to the plain root, and Adam's
bias correction is part of the learning rate (see `viviane.config.optimizers`).

In training a `DenseMover` takes the arithmetic over: it moves all tensors in one kernel, by numbers that are read from
the device, so that a CUDA graph can replay it. Its results differ from those here by rounding alone. `DenseGradients`
defines where the gradient of a dense weight is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from viviane.config import AnyOptimizer, Solver
from viviane.core.errors import ConfigError, NumericsError
from viviane.ops.capture import is_capturing
from viviane.ops.dense_update import Workspace, move_tensors
from viviane.ops.rules import DenseNumbers, DenseRule, rule_of

_KIND: Final = attrgetter("device", "dtype")
_IS_SPARSE: Final = attrgetter("is_sparse")


class DenseOptimizer(torch.optim.Optimizer):
    """A rule over dense parameters: groups tensors by device and dtype, and counts steps per group.

    The learning rate of a group is its "lr". `set_lr` writes it from the schedule.

    Args:
        params: parameters, or groups as in torch.optim.
        lr: learning rate.
        own_lr: whether the schedule scales `lr` instead of replacing it.
        rule: the arithmetic.
        defaults: its settings, which a group may override.

    Attributes:
        rule: the arithmetic.
        mover: computes the update; None: plain torch.
        beside: gradients of another type than their parameter's, which `grad` cannot hold, in its place.
    """

    mover: DenseMover | None = None
    beside: Mapping[Tensor, Tensor] = MappingProxyType({})

    def __init__(self, params: Iterable[Any], lr: float, own_lr: bool, rule: DenseRule, **defaults: Any) -> None:
        if not lr > 0:
            raise ConfigError("the learning rate must be positive", value=lr)
        self.rule = rule
        super().__init__(params, {"lr": lr, "initial_lr": lr, "own_lr": own_lr, "step": 0, **defaults})

    def __getstate__(self) -> dict[str, Any]:
        """Give what a copy gets: torch's optimizers keep only their state, groups and defaults."""
        return {**super().__getstate__(), "rule": self.rule, "mover": self.mover}

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state of each parameter."""
        return self.rule.states

    def numbers(self, group: dict[str, Any]) -> DenseNumbers:
        """Return what the group's present step is computed with.

        Example:
            >>> from viviane.config import SGD
            >>> optimizer = build_dense_optimizer(SGD(momentum=0.5), [torch.ones(1)], lr=0.1)
            >>> optimizer.numbers(optimizer.param_groups[0]).first
            0.5
        """
        return self.rule.dense_numbers(group)

    def set_lr(self, lr: float, factor: float = 1.0) -> None:
        """Set the learning rate of the next step.

        Args:
            lr: the schedule's rate, taken by groups without a rate of their own.
            factor: the schedule's factor; a group's own rate is multiplied by it.
        """
        for group in self.param_groups:
            group["lr"] = group["initial_lr"] * factor if group["own_lr"] else lr

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a group that names an "lr" keeps it as its own."""
        if "lr" in param_group:
            param_group.setdefault("initial_lr", param_group["lr"])
            param_group.setdefault("own_lr", True)
        # torch keeps its compiler out of this call, and imports it for that: a second in which nothing is trained.
        add = inspect.unwrap(torch.optim.Optimizer.add_param_group)
        add(self, param_group)

    def update(self, scale: float | Tensor = 1.0) -> None:
        """Do what `step` does, without the range of torch's profiler around it, which takes longer than small updates.

        `step` itself is called where it has hooks, is replaced, a profiler is active, or autograd records.
        """
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        hooks = hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        is_profiled = torch.autograd.profiler._is_profiler_enabled  # of whichever thread
        if hooks or "step" in vars(self) or is_profiled or torch.is_grad_enabled():
            self.step(scale=scale)
        else:
            self._update(scale)

    @overload
    def step(self, closure: None = None, *, scale: float | Tensor = 1.0) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, scale: float | Tensor = 1.0) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, scale: float | Tensor = 1.0) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss again, as in torch.optim.
            scale: what gradients are multiplied by first; a number, or 0-dim.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(scale)
        return loss

    def _update(self, scale: float | Tensor) -> None:
        """Count a step of each group, and move its parameters by device and type."""
        beside = self.beside
        for place, group in enumerate(self.param_groups):
            params = group["params"]
            given = [beside.get(one, one.grad) for one in params] if beside else [one.grad for one in params]
            moved = [one for one, gradient in zip(params, given, strict=True) if gradient is not None]
            gradients = [one for one in given if one is not None]
            if not moved:
                continue
            group["step"] += 1
            kinds = [*map(_KIND, moved)]
            for kind in dict.fromkeys(kinds):
                inside = [one == kind for one in kinds]
                self._move([*compress(moved, inside)], [*compress(gradients, inside)], place, group, scale)

    def _move(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        place: int,
        group: dict[str, Any],
        scale: float | Tensor,
    ) -> None:
        """Update parameters of one device and type."""
        if any(map(_IS_SPARSE, gradients)):
            raise NumericsError("a dense optimizer got a sparse gradient", fix="use viviane.EmbeddingCollection")
        names = self.rule.states
        kept = []
        for param in params if names else ():
            state = self.state[param]  # a tensor's hash is a call in Python: once for each parameter
            if not state:
                start = group.get("initial_accumulator", 0.0)
                # AdaGrad's sum and FTRL's n begin with it; FTRL's z, the second, with zero.
                starts = [start, *[0.0] * (len(names) - 1)]
                state = self.state[param] = {
                    name: torch.full_like(param, one) for name, one in zip(names, starts, strict=True)
                }
            kept.append(state)
        states = [[state[name] for state in kept] for name in names]
        if self.mover is not None:
            self.mover(self, place, params, gradients, states, scale)
            return
        gradients = [one.to(param.dtype) for one, param in zip(gradients, params, strict=True)]
        if isinstance(scale, Tensor) or scale != 1.0:
            gradients = list(torch._foreach_mul(gradients, scale))
        if self.decays(group):
            gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
        self.rule.update_dense(params, gradients, states, self.numbers(group), bool(group.get("epsilon_inside_root")))

    def decays(self, group: Mapping[str, Any]) -> bool:
        """Whether weight decay is added to the gradients of a group."""
        return self.rule.couples_decay and bool(group["weight_decay"])


def build_dense_optimizer(settings: AnyOptimizer, params: Iterable[Any], lr: float) -> DenseOptimizer:
    """Build the optimizer of dense parameters from its settings.

    Args:
        settings: which rule; `settings.lr`, where set, is the rate instead of `lr` and `set_lr` scales it by
            the schedule's factor. Tables follow the same convention in `EmbeddingCollection.step(lr, factor=...)`.
        params: parameters, or groups as in torch.optim; a group may override "lr" and "weight_decay".
        lr: the solver's learning rate.

    Raises:
        ConfigError: the rule, or one of its settings, is for embedding tables only.

    Example:
        >>> from viviane.config import SGD
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = build_dense_optimizer(SGD(), [weight], lr=0.5)
        >>> weight.sum().backward(); optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """
    options = settings.to_dict()
    fix = "give this rule as the embedding_optimizer, and another one to the dense layers"
    for name in ("clip_row_norm", "row_wise"):
        if options.pop(name, None):
            raise ConfigError(
                f"{name} is for embedding tables", where="the dense optimizer", value=settings.type, fix=fix
            )
    rule = rule_of(settings.model_copy(update={"update": "local"}) if "update" in options else settings)
    if not isinstance(rule, DenseRule):
        raise ConfigError("the rule is for embedding tables", where="the dense optimizer", value=settings.type, fix=fix)
    for name in ("type", "update"):  # dense parameters always move as a whole
        options.pop(name, None)
    own = options.pop("lr")
    return DenseOptimizer(params, lr if own is None else own, own is not None, rule, **options)


class DenseGradients:
    """Gradients of dense parameters: in `grad`, or in `wire_gradients` if their type differs, which torch refuses.

    Args:
        parameters: parameters by name.

    Attributes:
        wire_gradients: gradients whose type differs from their parameter's, instead of its `grad`.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> gradients = DenseGradients(dict(layer.named_parameters()))
        >>> gradients.wire_gradients[layer.weight] = layer.weight.detach().bfloat16()
        >>> gradients.named()["weight"].dtype
        torch.bfloat16
        >>> gradients.drop(); gradients.named()
        {}
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.wire_gradients: dict[Tensor, Tensor] = {}

    def named(self) -> dict[str, Tensor]:
        """Return the existing gradients, by parameter name."""
        if not self.wire_gradients:  # a tensor's hash is a call in Python
            return {name: one.grad for name, one in self.parameters.items() if one.grad is not None}
        found = {name: self.wire_gradients.get(one, one.grad) for name, one in self.parameters.items()}
        return {name: one for name, one in found.items() if one is not None}

    def all(self) -> list[Tensor]:
        """Return the existing gradients."""
        return list(self.named().values())

    def drop(self) -> None:
        """Drop all gradients."""
        self.wire_gradients.clear()
        for parameter in self.parameters.values():
            parameter.grad = None


def all_numbers(optimizer: DenseOptimizer, place: int) -> list[float]:
    """Return the values that `viviane.ops.dense_update` reads in the current step of a parameter group.

    Example:
        >>> from viviane.config import SGD
        >>> all_numbers(build_dense_optimizer(SGD(momentum=0.75), [torch.ones(1)], 0.5), 0)
        [0.5, 0.0, 0.0, 0.75, 0.0, 0.25, 1.0, 0.0, 0.0]
    """
    return optimizer.numbers(optimizer.param_groups[place]).values()


class DenseMover:
    """Updates all dense parameters of a group in one launch.

    An eager launch copies the values of the step to the device; a captured launch reads the tensors of
    `device_numbers`.

    Attributes:
        device_numbers: returns the values of a parameter group on the device; set before a capture.
        gate: gate of captured steps.
    """

    def __init__(self) -> None:
        self.device_numbers: Callable[[int], Tensor] | None = None
        self.gate: Tensor | None = None
        self._workspaces: dict[int, Workspace] = {}

    def __call__(
        self,
        optimizer: DenseOptimizer,
        place: int,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[list[Tensor]],
        scale: float | Tensor,
    ) -> None:
        """Move the tensors of the group at `place` by `optimizer.numbers(group)`, with gradients times `scale`.

        Gradients may have 16 bits where their parameters have 32.
        """
        device, group = params[0].device, optimizer.param_groups[place]
        gate, factor = None, scale if isinstance(scale, Tensor) else None
        if not isinstance(scale, Tensor) and scale != 1.0:
            factor = torch.full((), scale, dtype=torch.float32, device=device)
        numbers: Tensor | list[float]
        if self.device_numbers is not None and is_capturing(device):
            numbers, gate = self.device_numbers(place), self.gate
        else:
            values = optimizer.numbers(group).values()
            numbers = values if device.type == "cpu" else _on_device(values, device)
        move_tensors(
            optimizer.rule.name, params, gradients, states, numbers, inside=bool(group.get("epsilon_inside_root")),
            decays=optimizer.decays(group), scale=factor, gate=gate,
            workspace=self._workspaces.get(place) or self._workspaces.setdefault(place, Workspace()),
        )  # fmt: skip

    def reserve(self, optimizer: DenseOptimizer) -> list[Tensor]:
        """Reserve the memory that captured launches read, before a capture; keep it as long as the graph."""
        groups = enumerate(optimizer.param_groups)
        return [self._workspaces.setdefault(i, Workspace()).reserve(group["params"]) for i, group in groups]

    def write(self) -> list[Tensor]:
        """Write the memory that captured launches read, after a capture; return more tensors to keep with the graph.

        Eager steps create these tensors, and replace them when other parameters have gradients.
        """
        for workspace in self._workspaces.values():
            workspace.write()
        return [one for workspace in self._workspaces.values() for one in workspace.tensors.values()]


def _on_device(values: list[float], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.float64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class LearningRateSchedule:
    """Learning rates by step, the first step being 1; a pure function of the solver, so nothing is to be saved.

        n < warmup_steps                    lr n / warmup_steps
        decay_start == 0 or n < decay_start lr
        n < decay_start + decay_steps       max(end_lr, lr ((decay_start + decay_steps - n) / decay_steps)^decay_power)
        afterwards                          end_lr

    Example:
        >>> schedule = LearningRateSchedule(Solver(lr=1.0, warmup_steps=4, decay_start=6, decay_steps=2))
        >>> [schedule.lr(n) for n in range(1, 10)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.25, 0.0, 0.0]

    Source: HugeCTR's LearningRateScheduler.
    """

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    def lr(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 1."""
        if step < 1:
            raise ConfigError("steps count from 1", value=step)
        solver = self.solver
        if step < solver.warmup_steps:
            return solver.lr * step / solver.warmup_steps
        if solver.decay_start == 0 or step < solver.decay_start:
            return solver.lr
        left = solver.decay_start + solver.decay_steps - step
        if left > 0:
            return float(max(solver.end_lr, solver.lr * (left / solver.decay_steps) ** solver.decay_power))
        return solver.end_lr

    def factor(self, step: int) -> float:
        """Return lr(step) / solver.lr: what an optimizer's own learning rate is multiplied by."""
        return self.lr(step) / self.solver.lr
