"""Optimizer settings; one object drives the dense weights and the embedding tables.

The arithmetic, with g the gradient, t the step from 1, and epsilon outside the root:

    SGD           w -= lr g
      momentum    a = momentum a - lr g;  w += a
      nesterov    b = momentum a - lr g;  w += (1 + momentum) b - momentum a;  a = b
    AdaGrad       s += g^2;  w -= lr g / (sqrt(s) + epsilon)               s starts at initial_accumulator
      row_wise    s += mean of g^2 over the row, one number per row of a table
    RMSProp       s = decay s + (1 - decay) g^2;  w -= lr g / (sqrt(s) + epsilon)
    Adam          m, v: running means of g, g^2
                  a = lr sqrt(1 - beta2^t) / (1 - beta1^t);  w -= a m / (sqrt(v) + epsilon)
    Adamax        m as Adam's;  u = max(beta2 u, |g|);  w -= lr / (1 - beta1^t) m / (u + epsilon)
    Adadelta      s = decay s + (1 - decay) g^2;  d = sqrt(r + epsilon) / sqrt(s + epsilon) g
                  r = decay r + (1 - decay) d^2;  w -= lr d
    AdamW         w -= lr weight_decay w, then Adam's step without weight decay in the gradient
    RowWiseAdam   tables only: Adam with v = beta2 v + (1 - beta2) mean of g^2 over the row, one number per row
    Lamb          m, v as Adam's;  u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay w
                  w -= lr |w| / |u| u;  norms of a row of a table, or of a dense parameter; 1 where a norm is 0
    Ftrl          n' = n + g^2;  z += g + (sqrt(n + e) - sqrt(n' + e)) w / lr
                  w = 0 where |z| <= lambda1
                  w = (sign(z) lambda1 - z) / (sqrt(n' + e) / lr + lambda2 + beta / lr) elsewhere;  e = 2^-23

With `epsilon_inside_root` the denominator is sqrt(s + epsilon).

Embedding tables: gradients of a key that occurs several times in a batch are summed first. By `update`

    "local"        only rows of the batch and their state are updated
    "global"       every row of the table is decayed and updated in each step, like a dense parameter
    "lazy_global"  Adam only: the k skipped steps of a row are applied when it is next updated, before its step:
                   w -= a m beta1 (1 - beta1^k) / (1 - beta1) / (sqrt(v) + epsilon);  m *= beta1^k;  v *= beta2^k
                                  which is "global" with a and v constant over the k steps. The step counts of rows are
                                  float32 and exact up to 16.7 million steps.

For SGD without momentum, AdaGrad and Ftrl a row without gradient does not change in any mode. Bias correction uses the
step count of the table.

Sources: Kingma and Ba 2015 (Adam, Adamax); Zeiler 2012 (Adadelta); Duchi et al. 2011 (AdaGrad); Loshchilov and Hutter
2019 (AdamW); You et al. 2020 (LAMB); McMahan et al. 2013 (FTRL); Tieleman and Hinton 2012 (RMSProp); HugeCTR's update
rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, model_validator

from viviane.config.base import Settings, validate
from viviane.core.errors import ConfigError, suggest

Update = Literal["local", "global"]


class _Optimizer(Settings):
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; None: the solver's. The solver's schedule applies to both."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2: adds weight_decay * w to the gradient; on tables, only to updated rows."""
    clip_row_norm: float | None = Field(default=None, gt=0)
    """Tables only: scale the summed gradient of a row so that its L2 norm is at most this, before weight decay."""


class SGD(_Optimizer):
    """Stochastic gradient descent: w -= lr g, optionally with momentum or Nesterov momentum.

    Example:
        >>> SGD(lr=0.1).lr
        0.1
    """

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    update: Update = "local"

    @model_validator(mode="after")
    def _check(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.update == "global" and not self.momentum:
            raise ValueError("update='global' needs a momentum: otherwise rows without gradient do not change")
        return self


class AdaGrad(_Optimizer):
    """AdaGrad: s += g^2; w -= lr g / (sqrt(s) + epsilon)."""

    type: Literal["adagrad"] = "adagrad"
    initial_accumulator: float = Field(default=0.0, ge=0, le=3.4e38)
    epsilon: float = Field(default=1e-7, gt=0)
    epsilon_inside_root: bool = False
    row_wise: bool = False
    """Tables only: one accumulator per row, the mean of g^2 over the row."""


class RMSProp(_Optimizer):
    """RMSProp: s = decay s + (1 - decay) g^2; w -= lr g / (sqrt(s) + epsilon)."""

    type: Literal["rmsprop"] = "rmsprop"
    decay: float = Field(default=0.9, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    epsilon_inside_root: bool = False
    update: Update = "local"


class Adam(_Optimizer):
    """Adam: a = lr sqrt(1 - beta2^t) / (1 - beta1^t); w -= a m / (sqrt(v) + epsilon)."""

    type: Literal["adam"] = "adam"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    epsilon_inside_root: bool = False
    update: Literal["local", "global", "lazy_global"] = "local"


class Adamax(_Optimizer):
    """Adamax: m as Adam's; u = max(beta2 u, |g|); w -= lr / (1 - beta1^t) m / (u + epsilon)."""

    type: Literal["adamax"] = "adamax"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    update: Update = "local"


class Adadelta(_Optimizer):
    """Adadelta: s = decay s + (1 - decay) g^2; d = sqrt(r + e) / sqrt(s + e) g; r as s, of d; w -= lr d."""

    type: Literal["adadelta"] = "adadelta"
    decay: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    update: Update = "local"


class AdamW(_Optimizer):
    """Adam with decoupled weight decay: w -= lr weight_decay w, then Adam's step; in tables, only of updated rows."""

    type: Literal["adamw"] = "adamw"
    weight_decay: float = Field(default=0.01, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    epsilon_inside_root: bool = False
    update: Update = "local"


class RowWiseAdam(_Optimizer):
    """Tables only: Adam with one second moment per row, v = beta2 v + (1 - beta2) mean of g^2; half of Adam's state."""

    type: Literal["row_wise_adam"] = "row_wise_adam"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)
    epsilon_inside_root: bool = False


class Lamb(_Optimizer):
    """LAMB: w -= lr |w| / |u| u with u Adam's direction plus weight_decay w; norms of rows, or of dense parameters."""

    type: Literal["lamb"] = "lamb"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-6, gt=0)


class Ftrl(_Optimizer):
    """Follow the regularized leader, proximal: unimportant weights become exactly zero (lambda1)."""

    type: Literal["ftrl"] = "ftrl"
    initial_accumulator: float = Field(default=0.0, ge=0, le=3.4e38)
    """What n, the sum of squares, begins with."""
    beta: float = Field(default=0.0, ge=0)
    lambda1: float = Field(default=0.0, ge=0)
    lambda2: float = Field(default=0.0, ge=0)


AnyOptimizer = SGD | AdaGrad | RMSProp | Adam | AdamW | RowWiseAdam | Lamb | Ftrl | Adamax | Adadelta
OptimizerSettings = Annotated[AnyOptimizer, Field(discriminator="type")]


def optimizer_from_dict(data: Any, where: str | None = None) -> AnyOptimizer:
    """Build optimizer settings from plain data such as {"type": "adam", "lr": 0.001}."""
    result: AnyOptimizer = validate(OptimizerSettings, data, where)
    return result


_BY_TYPE: Final[dict[str, type[AnyOptimizer]]] = {
    kind.model_fields["type"].default: kind for kind in get_args(AnyOptimizer)
}
_TORCH_NAMES: Final = {
    "adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "AdaGrad", "rmsprop": "RMSProp", "adamax": "Adamax",
    "adadelta": "Adadelta",
}  # fmt: skip


def optimizer_settings(given: Any, where: str = "optimizer") -> AnyOptimizer:
    """Return optimizer settings from settings, a name (with default values), or plain data.

    Args:
        given: settings, a name such as "adam", or a dict as in a file.
        where: location for errors.

    Raises:
        ConfigError: an unknown name, a torch optimizer, which does not support embedding tables, or another type.

    Example:
        >>> optimizer_settings("adam")
        Adam(lr=None, ...)
    """
    if isinstance(given, get_args(AnyOptimizer)):
        return given  # type: ignore[no-any-return]
    if isinstance(given, str):
        kind = _BY_TYPE.get(given.lower().replace("-", "_"))
        if kind is None:
            raise ConfigError("unknown optimizer", where=where, value=given, fix=suggest(given.lower(), _BY_TYPE))
        return kind()
    if isinstance(given, dict):
        return optimizer_from_dict(given, where)
    name = given.__name__ if isinstance(given, type) else type(given).__name__
    is_own = isinstance(given, type) and issubclass(given, get_args(AnyOptimizer))
    same = name if is_own else _TORCH_NAMES.get(name.lower())
    raise ConfigError(
        "not optimizer settings",
        where=where,
        value=name if not isinstance(given, int | float) else given,
        allowed="viviane.Adam(lr=1e-3) or similar, or a name: " + ", ".join(_BY_TYPE),
        fix=f"pass viviane.{same}()" if same else None,
    )
