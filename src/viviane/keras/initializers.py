"""Keras' initializers and regularizers as settings of tables."""

from __future__ import annotations

from typing import Any, Final

import keras

from viviane.config.base import validate
from viviane.config.optimizers import AnyOptimizer
from viviane.core.errors import ConfigError
from viviane.embedding import ConstantInit, NormalInit, UniformInit, XavierInit, ZeroInit
from viviane.embedding.config import InitSettings

_OWN: Final = (UniformInit, NormalInit, XavierInit, ZeroInit, ConstantInit)


def is_own(initializer: Any) -> bool:
    """Return whether an initializer is Viviane's: drawn row by row, without a second copy of the table."""
    return isinstance(initializer, _OWN)


def get_initializer(given: Any) -> Any:
    """Return an initializer: Viviane's settings as they are, or what Keras makes of it."""
    if is_own(given):
        return given
    if isinstance(given, dict) and "viviane" in given:
        return validate(InitSettings, given["viviane"], "initializer")
    return keras.initializers.get(given)


def save_initializer(initializer: Any) -> Any:
    """Return an initializer as plain data, for a layer's `get_config`."""
    if is_own(initializer):
        return {"viviane": initializer.model_dump(mode="json")}
    return keras.initializers.serialize(initializer)


def law_of_rows(initializer: Any, where: str) -> Any:
    """Return the law by which a dynamic table draws the row of a new key.

    Raises:
        ConfigError: the initializer needs the whole matrix.

    Example:
        >>> law_of_rows(keras.initializers.RandomNormal(stddev=0.5), "here")
        NormalInit(type='normal', mean=0.0, std=0.5)
    """
    if is_own(initializer):
        return initializer
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    kind = type(initializer).__name__
    if kind == "RandomUniform":
        return UniformInit(low=config["minval"], high=config["maxval"])
    if kind == "RandomNormal":
        return NormalInit(mean=config["mean"], std=config["stddev"])
    if kind in ("Zeros", "Ones", "Constant"):
        return ConstantInit(value={"Zeros": 0.0, "Ones": 1.0}.get(kind, config.get("value")))
    raise ConfigError(
        "a dynamic table draws each row when its key comes first, and this initializer needs the whole matrix",
        where=where, value=kind, allowed="RandomUniform, RandomNormal, Zeros, Ones, Constant, viviane.UniformInit(...)",
    )  # fmt: skip


def regularized(settings: AnyOptimizer, regularizer: Any, where: str) -> AnyOptimizer:
    """Return a rule with a regularizer's gradient: 2 l2 w is added to the gradient of the rows that move.

    Raises:
        ConfigError: the regularizer is not an L2.

    Example:
        >>> from viviane.config import SGD
        >>> regularized(SGD(), keras.regularizers.L2(0.25), "here").weight_decay
        0.5
    """
    if regularizer is None:
        return settings
    config = regularizer.get_config() if hasattr(regularizer, "get_config") else {}
    if type(regularizer).__name__ not in ("L2", "L1L2") or config.get("l1") or "l2" not in config:
        raise ConfigError(
            "tables have L2 regularization alone", where=where, value=type(regularizer).__name__,
            fix="use keras.regularizers.L2(...), or regularize the layer's output",
        )  # fmt: skip
    if settings.type == "adamw":
        raise ConfigError("AdamW decays weights by itself", where=where, fix="leave the regularizer out")
    decay = settings.weight_decay + 2.0 * float(config["l2"])
    decayed: AnyOptimizer = settings.model_copy(update={"weight_decay": decay})
    return decayed
