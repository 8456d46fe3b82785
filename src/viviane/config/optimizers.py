"""Optimizer settings; one object drives the dense weights and the embedding tables.

The arithmetic, with g the gradient, t the step from 1 and epsilon outside the root:

    SGD      w -= lr g
    AdaGrad  s += g^2;  w -= lr g / (sqrt(s) + epsilon)                      s starts at initial_accumulator
    Adam     m, v: running means of g, g^2;  a = lr sqrt(1 - beta2^t) / (1 - beta1^t);  w -= a m / (sqrt(v) + epsilon)

Embedding tables use the lazy forms: gradients of a key that stands several times in a batch are summed
first, then only the rows of the batch and their state move (`update="local"`). Bias correction counts the
table's steps.

Source: Kingma and Ba 2015 (Adam); Duchi et al. 2011 (AdaGrad); HugeCTR's update rules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from viviane.config.base import Settings, validate


class _Optimizer(Settings):
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; None takes the solver's, with its schedule. A value is scaled by the same schedule."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2: adds weight_decay * w to the gradient; on tables, of the rows of the batch only."""


class SGD(_Optimizer):
    """Stochastic gradient descent: w -= lr g.

    Example:
        >>> SGD(lr=0.1).lr
        0.1
    """

    type: Literal["sgd"] = "sgd"


class AdaGrad(_Optimizer):
    """AdaGrad: s += g^2; w -= lr g / (sqrt(s) + epsilon)."""

    type: Literal["adagrad"] = "adagrad"
    initial_accumulator: float = Field(default=0.0, ge=0)
    epsilon: float = Field(default=1e-7, gt=0)


class Adam(_Optimizer):
    """Adam: a = lr sqrt(1 - beta2^t) / (1 - beta1^t); w -= a m / (sqrt(v) + epsilon)."""

    type: Literal["adam"] = "adam"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-7, gt=0)


OptimizerSettings = Annotated[SGD | AdaGrad | Adam, Field(discriminator="type")]


def optimizer_from_dict(data: Any, where: str | None = None) -> SGD | AdaGrad | Adam:
    """Build optimizer settings from plain data such as {"type": "adam", "lr": 0.001}."""
    result: SGD | AdaGrad | Adam = validate(OptimizerSettings, data, where)
    return result
