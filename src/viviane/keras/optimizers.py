"""Keras' optimizers as the rules of embedding tables, with the same arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, get_args

import keras

from viviane.config.optimizers import (
    SGD,
    Adadelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    AnyOptimizer,
    Ftrl,
    RMSProp,
    optimizer_from_dict,
)
from viviane.core.errors import ConfigError

_CLIPS: Final = ("clipnorm", "clipvalue", "global_clipnorm")
_OWN: Final = "viviane.{}(lr=...)"


@dataclass(frozen=True)
class Rule:
    """How a table is updated.

    Args:
        settings: the optimizer's arithmetic, without a rate.
        rate: a number, one of Keras' schedules, or None where it is not known yet.
        source: the Keras optimizer whose rate this is, if any: callbacks that set its rate set the tables' too.
    """

    settings: AnyOptimizer
    rate: Any
    source: Any = None


def rule_of(optimizer: Any, where: str) -> Rule:
    """Return the rule for what a user gives as optimizer.

    Args:
        optimizer: a Keras optimizer or its name, Viviane's settings, or None.
        where: for errors.

    Raises:
        ConfigError: Viviane has no rule with the same arithmetic.

    Example:
        >>> rule_of(keras.optimizers.Adagrad(0.5), "here").settings
        AdaGrad(lr=None, ..., epsilon_inside_root=True, ...)
    """
    if optimizer is None:
        return Rule(SGD(), None)
    if isinstance(optimizer, get_args(AnyOptimizer)):
        return Rule(optimizer.model_copy(update={"lr": None}), optimizer.lr)
    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "not an optimizer of tables", where=where, value=type(optimizer).__name__,
            allowed="a Keras optimizer or its name, or viviane.SGD(lr=...) and the like",
        )  # fmt: skip
    return Rule(_settings(optimizer, where), _rate(optimizer), optimizer)


def _rate(optimizer: Any) -> Any:
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _settings(optimizer: Any, where: str) -> AnyOptimizer:
    config = optimizer.get_config()
    _refuse_options(optimizer, config, where)
    kind = type(optimizer).__name__
    make = _RULES.get(kind)
    if make is None:
        raise ConfigError(
            "no rule of tables has this optimizer's arithmetic", where=where, value=kind,
            allowed=", ".join(_RULES), fix="give the tables one of Viviane's: " + _OWN.format("Adam"),
        )  # fmt: skip
    return make(config, where)


def _refuse_options(optimizer: Any, config: dict[str, Any], where: str) -> None:
    wrong = [name for name in _CLIPS if config.get(name) is not None]
    wrong += [name for name in ("use_ema", "gradient_accumulation_steps", "loss_scale_factor") if config.get(name)]
    if config.get("weight_decay") and not isinstance(optimizer, keras.optimizers.AdamW):
        wrong.append("weight_decay")
    if wrong:
        raise ConfigError(
            "an option that tables do not have", where=where, value=", ".join(wrong),
            fix="give the layer an optimizer of its own, without it; viviane.SGD(lr=..., clip_row_norm=...) and the "
            "like clip by row",
        )  # fmt: skip


def _sgd(config: dict[str, Any], where: str) -> AnyOptimizer:
    momentum = config["momentum"]
    # Keras moves every row by its momentum, touched or not.
    return SGD(momentum=momentum, nesterov=config["nesterov"], update="global" if momentum else "local")


def _adagrad(config: dict[str, Any], where: str) -> AnyOptimizer:
    start, epsilon = config["initial_accumulator_value"], config["epsilon"]
    return AdaGrad(initial_accumulator=start, epsilon=epsilon, epsilon_inside_root=True)


def _adam(config: dict[str, Any], where: str) -> AnyOptimizer:
    if config["amsgrad"]:
        raise ConfigError("tables have no amsgrad", where=where, fix="use Adam without it")
    return Adam(beta1=config["beta_1"], beta2=config["beta_2"], epsilon=config["epsilon"], update="global")


def _adamw(config: dict[str, Any], where: str) -> AnyOptimizer:
    plain = _adam(config, where)
    assert isinstance(plain, Adam)
    return AdamW(
        weight_decay=config["weight_decay"] or 0.0, beta1=plain.beta1, beta2=plain.beta2, epsilon=plain.epsilon,
        update="global",
    )  # fmt: skip


def _rmsprop(config: dict[str, Any], where: str) -> AnyOptimizer:
    if config["momentum"] or config["centered"]:
        raise ConfigError("tables have RMSprop without momentum, not centered", where=where, fix="use it without them")
    return RMSProp(decay=config["rho"], epsilon=config["epsilon"], epsilon_inside_root=True, update="global")


def _adamax(config: dict[str, Any], where: str) -> AnyOptimizer:
    return Adamax(beta1=config["beta_1"], beta2=config["beta_2"], epsilon=config["epsilon"], update="global")


def _adadelta(config: dict[str, Any], where: str) -> AnyOptimizer:
    return Adadelta(decay=config["rho"], epsilon=config["epsilon"], update="global")


def _ftrl(config: dict[str, Any], where: str) -> AnyOptimizer:
    if config["learning_rate_power"] != -0.5 or config["l2_shrinkage_regularization_strength"]:
        raise ConfigError("tables have FTRL with learning_rate_power=-0.5 and without shrinkage", where=where)
    return Ftrl(  # of touched rows alone: Keras' dense gradients set all others to zero in the first step
        initial_accumulator=config["initial_accumulator_value"], beta=config["beta"],
        lambda1=config["l1_regularization_strength"], lambda2=2.0 * config["l2_regularization_strength"],
    )  # fmt: skip


_RULES: Final = {
    "SGD": _sgd, "Adagrad": _adagrad, "RMSprop": _rmsprop, "Adam": _adam, "AdamW": _adamw, "Adamax": _adamax,
    "Adadelta": _adadelta, "Ftrl": _ftrl,
}  # fmt: skip


def for_dynamic(settings: AnyOptimizer, where: str) -> AnyOptimizer:
    """Return a rule for a dynamic table, whose rows move only when they are touched.

    Adam makes up for the steps in which a row rested.

    Raises:
        ConfigError: the rule moves every row in each step, touched or not.
    """
    if isinstance(settings, Adam) and settings.update == "global":
        return settings.model_copy(update={"update": "lazy_global"})
    if getattr(settings, "update", "local") == "global":
        raise ConfigError(
            "this Keras optimizer moves every row in each step, a dynamic table only those of the batch", where=where,
            value=type(settings).__name__,
            fix=f"give the layer an optimizer of its own that moves touched rows: "
            f"{_OWN.format(type(settings).__name__)}; or use Keras' SGD without momentum, Adagrad, Adam or Ftrl",
        )  # fmt: skip
    return settings


def save_optimizer(optimizer: Any) -> Any:
    """Return an optimizer as plain data, for a layer's `get_config`."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, get_args(AnyOptimizer)):
        return {"viviane": optimizer.model_dump(mode="json")}
    # Keras writes this mark into the settings of an object that it meets twice, but not into a layer's copy of them.
    # With it `load_model` makes one optimizer of the model's and the layers', as it was before.
    return {**keras.saving.serialize_keras_object(optimizer), "shared_object_id": id(optimizer)}


def load_optimizer(data: Any) -> Any:
    """Return what `save_optimizer` wrote."""
    if isinstance(data, dict) and "viviane" in data:
        return optimizer_from_dict(data["viviane"], "optimizer")
    if isinstance(data, dict):
        return keras.saving.deserialize_keras_object(data)
    return data
