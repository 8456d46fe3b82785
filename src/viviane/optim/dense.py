"""SGD, AdaGrad, RMSProp, Adam and FTRL for dense parameters, all parameters of a device moved by a few calls.

They are ordinary `torch.optim.Optimizer` classes. Two formulas differ from torch.optim: epsilon is added to
the plain root, and Adam's bias correction stands in the learning rate, so that dense weights and embedding
tables follow one rule (see `viviane.config.optimizers`).

A `Mover` may take the arithmetic over: training on a GPU gives one that moves all tensors in one launch, by numbers
that lie on the device, so that a CUDA graph can repeat it. Its results differ from those here by rounding alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from viviane import config
from viviane.core.errors import ConfigError, NumericsError

_FTRL_EPSILON = 2.0**-23


class Mover(Protocol):
    """Moves the parameters of a group in the optimizer's place."""

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
        ...


class DenseOptimizer(torch.optim.Optimizer):
    """Base of the dense optimizers: groups tensors by device and dtype, and counts steps per group.

    The learning rate of a group is its "lr". `set_lr` writes it from the schedule.

    Attributes:
        mover: who does the arithmetic; None: the formulas here.
        beside: gradients of another type than their parameter's, which `grad` cannot hold, in its place.
    """

    rule: str = ""
    """Its name in `viviane.ops.dense_update`."""
    state_names: tuple[str, ...] = ()
    mover: Mover | None = None
    beside: Mapping[Tensor, Tensor] = MappingProxyType({})

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return what the group's present step is computed with: rate, weight decay, epsilon, first, second.

        Example:
            >>> optimizer = Adam([torch.ones(1)], 0.1, False, beta1=0.5, beta2=0.75, epsilon=1e-7, weight_decay=0.0)
            >>> group = optimizer.param_groups[0]
            >>> group["step"] = 1
            >>> optimizer.numbers(group)
            [0.1, 0.0, 1e-07, 0.5, 0.75]
        """
        return [group["lr"], group["weight_decay"], group.get("epsilon", 0.0), 0.0, 0.0]

    def __init__(self, params: Iterable[Any], lr: float, own_lr: bool, **defaults: Any) -> None:
        if not lr > 0:
            raise ConfigError("the learning rate must be positive", value=lr)
        super().__init__(params, {"lr": lr, "initial_lr": lr, "own_lr": own_lr, "step": 0, **defaults})

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
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None, *, scale: float | Tensor = 1.0) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, scale: float | Tensor = 1.0) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, scale: float | Tensor = 1.0) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: computes the loss anew, as in torch.optim.
            scale: what gradients are multiplied by first; a number, or 0-dim.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, group in enumerate(self.param_groups):
            params = [param for param in group["params"] if self._gradient(param) is not None]
            if not params:
                continue
            group["step"] += 1
            for same_kind in _by_device_and_dtype(params):
                self._move(same_kind, place, group, scale)
        return loss

    def _gradient(self, param: Tensor) -> Tensor | None:
        return self.beside.get(param, param.grad)

    def _move(self, params: list[Tensor], place: int, group: dict[str, Any], scale: float | Tensor) -> None:
        gradients: list[Tensor] = []
        for param in params:
            gradient = self._gradient(param)
            assert gradient is not None
            if gradient.is_sparse:
                raise NumericsError("a dense optimizer got a sparse gradient", fix="use viviane.EmbeddingCollection")
            gradients.append(gradient)
            if not self.state[param] and self.state_names:
                start = group.get("initial_accumulator", 0.0)
                self.state[param] = {name: torch.full_like(param, start) for name in self.state_names}
        if self.mover is not None:
            self.mover(self, place, params, gradients, self._states(params), scale)
            return
        gradients = [one.to(param.dtype) for one, param in zip(gradients, params, strict=True)]
        if isinstance(scale, Tensor) or scale != 1.0:
            gradients = list(torch._foreach_mul(gradients, scale))
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
        self._rule(params, gradients, *self._states(params), group=group)

    def _states(self, params: list[Tensor]) -> list[list[Tensor]]:
        return [[self.state[param][name] for param in params] for name in self.state_names]

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Sgd(DenseOptimizer):
    """w -= lr (g + weight_decay w); with momentum or Nesterov's as `viviane.config.optimizers` writes them."""

    def __init__(self, params: Iterable[Any], lr: float, own_lr: bool, **defaults: Any) -> None:
        self.state_names = ("momentum",) if defaults.get("momentum") else ()
        self.rule = "sgd" if not self.state_names else "nesterov" if defaults.get("nesterov") else "momentum"
        super().__init__(params, lr, own_lr, **defaults)

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return rate, weight decay, 0, momentum, 0."""
        return [group["lr"], group["weight_decay"], 0.0, group.get("momentum", 0.0), 0.0]

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        mu = group.get("momentum", 0.0)
        if not mu:
            torch._foreach_add_(params, gradients, alpha=-group["lr"])
            return
        (velocities,) = states
        if group["nesterov"]:
            torch._foreach_add_(params, velocities, alpha=-mu)
        torch._foreach_mul_(velocities, mu)
        torch._foreach_add_(velocities, gradients, alpha=-group["lr"])
        torch._foreach_add_(params, velocities, alpha=1 + mu if group["nesterov"] else 1.0)


class AdaGrad(DenseOptimizer):
    """s += g^2; w -= lr g / (sqrt(s) + epsilon)."""

    rule = "adagrad"
    state_names = ("accumulator",)

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        (accumulators,) = states
        torch._foreach_addcmul_(accumulators, gradients, gradients)
        torch._foreach_addcdiv_(params, gradients, _roots(accumulators, group), value=-group["lr"])


class RMSProp(DenseOptimizer):
    """s = decay s + (1 - decay) g^2; w -= lr g / (sqrt(s) + epsilon)."""

    rule = "rmsprop"
    state_names = ("accumulator",)

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return rate, weight decay, epsilon, decay, 0."""
        return [group["lr"], group["weight_decay"], group["epsilon"], group["decay"], 0.0]

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        (accumulators,) = states
        torch._foreach_mul_(accumulators, group["decay"])
        torch._foreach_addcmul_(accumulators, gradients, gradients, value=1 - group["decay"])
        torch._foreach_addcdiv_(params, gradients, _roots(accumulators, group), value=-group["lr"])


class Adam(DenseOptimizer):
    """a = lr sqrt(1 - beta2^t) / (1 - beta1^t); w -= a m / (sqrt(v) + epsilon)."""

    rule = "adam"
    state_names = ("m", "v")

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return a, weight decay, epsilon, beta1, beta2."""
        beta1, beta2 = group["beta1"], group["beta2"]
        return [_corrected(group), group["weight_decay"], group["epsilon"], beta1, beta2]

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        m, v = states
        beta1, beta2 = group["beta1"], group["beta2"]
        torch._foreach_lerp_(m, gradients, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - beta2)
        torch._foreach_addcdiv_(params, m, _roots(v, group), value=-_corrected(group))


class Ftrl(DenseOptimizer):
    """Follow the regularized leader; the arithmetic stands in `viviane.config.optimizers`."""

    rule = "ftrl"
    state_names = ("n", "z")

    def numbers(self, group: dict[str, Any]) -> list[float]:
        """Return 1 / lr, weight decay, lambda1, lambda2 + beta / lr, 0."""
        inverse = 1 / group["lr"]
        offset = group["lambda2"] + group["beta"] / group["lr"]
        return [inverse, group["weight_decay"], group["lambda1"], offset, 0.0]

    def _rule(
        self, params: list[Tensor], gradients: list[Tensor], *states: list[Tensor], group: dict[str, Any]
    ) -> None:
        lr, lambda1 = group["lr"], group["lambda1"]
        for w, g, n, z in zip(params, gradients, *states, strict=True):
            before = (n + _FTRL_EPSILON).sqrt_()
            root = n.addcmul_(g, g).add(_FTRL_EPSILON).sqrt_()
            z.add_(g).add_((before - root) * w, alpha=1 / lr)
            moved = (z.sign() * lambda1 - z) / (root / lr + (group["lambda2"] + group["beta"] / lr))
            w.copy_(torch.where(z.abs() <= lambda1, torch.zeros_like(w), moved))


def _corrected(group: dict[str, Any]) -> float:
    """Return Adam's rate with its bias correction."""
    beta1, beta2, t = group["beta1"], group["beta2"], max(1, group["step"])  # 0: nothing of the group has moved yet
    return float(group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t))


def _roots(squares: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    if group["epsilon_inside_root"]:
        return list(torch._foreach_sqrt(torch._foreach_add(squares, group["epsilon"])))
    roots = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(roots, group["epsilon"])
    return roots


def build_dense_optimizer(settings: config.AnyOptimizer, params: Iterable[Any], lr: float) -> DenseOptimizer:
    """Build the optimizer of dense parameters from its settings.

    Args:
        settings: which rule; `settings.lr`, where set, is the rate instead of `lr` and `set_lr` scales it by
            the schedule's factor. Tables follow the same convention in `EmbeddingCollection.step(lr, factor=...)`.
        params: parameters, or groups as in torch.optim; a group may override "lr" and "weight_decay".
        lr: the solver's learning rate.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = build_dense_optimizer(config.SGD(), [weight], lr=0.5)
        >>> weight.sum().backward(); optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5]
    """
    options = settings.to_dict()
    for name in ("clip_row_norm", "row_wise"):
        if options.pop(name, None):
            raise ConfigError(
                f"{name} is for embedding tables", where="the dense optimizer", value=settings.type,
                fix="give this rule as the embedding_optimizer, and another one to the dense layers",
            )  # fmt: skip
    options.pop("update", None)  # dense parameters always move as a whole
    kind = options.pop("type")
    own = options.pop("lr")
    kinds: dict[str, type[DenseOptimizer]] = {
        "sgd": Sgd, "adagrad": AdaGrad, "rmsprop": RMSProp, "adam": Adam, "ftrl": Ftrl
    }  # fmt: skip
    return kinds[kind](params, lr=lr if own is None else own, own_lr=own is not None, **options)


def _by_device_and_dtype(params: list[Tensor]) -> Iterable[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params:
        groups[param.device, param.dtype].append(param)
    return groups.values()
