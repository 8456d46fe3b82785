"""`OptimizerWrapper`: update the rows behind variables by the arithmetic of an optimizer of TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from viviane.config.optimizers import SGD as SGDSettings  # noqa: N811 - SOK has an SGD, too
from viviane.config.optimizers import AdaGrad, AnyOptimizer, Ftrl
from viviane.config.optimizers import Adam as AdamSettings
from viviane.core.errors import ConfigError
from viviane.embedding.external import checked_rate, short_traceback
from viviane.ops.row_update import initial_state
from viviane.tensorflow.arguments import pairs_of
from viviane.tensorflow.variables import plain_python, state_of, table_of, tensorflow


class SGD:
    """SOK's own optimizer: w -= lr g."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


class OptimizerWrapper:
    """Update tables by an optimizer of Keras 3, tf_keras or `SGD`; rows without gradient rest.

    Args:
        optimizer: SGD, Adagrad, Adam (as LazyAdam: touched rows alone) or Ftrl.

    Raises:
        ConfigError: tables do not have its arithmetic.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.settings = _settings(optimizer)
        self._steps: Any = None

    @property
    def lr(self) -> Any:
        """The learning rate at present."""
        return self._rate()

    @plain_python
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Update the tables of the variables.

        A gradient is the factor by which the script multiplied what `GradientTape.gradient` gave: 1, or 1 / scale under
        loss scaling. The rows' gradients wait in the tables.
        """
        tf = tensorflow()
        pairs = [(gradient, variable) for gradient, variable in pairs_of(grads_and_vars) if gradient is not None]
        if not pairs:
            raise ConfigError(
                "no variable has a gradient", fix="differentiate a loss that the lookups are part of. A model of Keras "
                "3 does not list these variables: keep them in a list of your own, or pip install tf_keras",
            )  # fmt: skip
        tables = [table_of(variable) for _, variable in pairs]
        for table in tables:
            if table.rule is None and not table.lookups.num_waiting:
                table.set_rule(self.settings)

        @short_traceback
        def step(rate: Any, *factors: Any) -> Any:
            for table, factor in zip(tables, factors, strict=True):
                table.step(self.settings, checked_rate(rate, "OptimizerWrapper"), float(factor))
            return np.int64(0)

        if self._steps is None:
            with tf.init_scope():
                self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        rate = tf.cast(self._rate(), tf.float32)
        done = tf.numpy_function(step, [rate, *[tf.convert_to_tensor(one) for one, _ in pairs]], tf.int64)
        with tf.control_dependencies([done]):
            self._steps.assign_add(1)
        return done

    def _rate(self) -> Any:
        rate = getattr(self.optimizer, "learning_rate", None)
        rate = getattr(self.optimizer, "lr", None) if rate is None else rate
        hidden = getattr(self.optimizer, "_learning_rate", None)
        if callable(hidden):  # a schedule of Keras 3, whose own steps are those of the dense variables
            rate = hidden
        return rate(0 if self._steps is None else self._steps) if callable(rate) else rate

    def get_slot_names(self) -> list[str]:
        """Return the names of the optimizer's state."""
        return slot_names(self.settings)

    def get_slot(self, variable: Any, slot_name: str) -> Any:
        """Return a table's state (N, D), in the order of `export`."""
        return tensorflow().constant(state_of(variable)[slot_name].numpy())


class Adam(OptimizerWrapper):
    """SOK 1.x's Adam: rows without gradient are moved by their momentum when they are touched next.

    Args:
        learning_rate, beta_1, beta_2, epsilon: as of tf.keras' Adam.
    """

    def __init__(
        self, learning_rate: Any = 1e-3, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7, **_: Any
    ) -> None:
        plain = tensorflow().keras.optimizers.Adam(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
        super().__init__(plain)
        self.settings = self.settings.model_copy(update={"update": "lazy_global"})


def slot_names(settings: AnyOptimizer) -> list[str]:
    """Return the names of an optimizer's state, as Viviane has them."""
    return list(initial_state(settings))


def _settings(optimizer: Any) -> AnyOptimizer:
    if isinstance(optimizer, SGD):
        return SGDSettings()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(inner, "get_config"):
        raise ConfigError("not an optimizer", value=type(optimizer).__name__, allowed="SGD, Adagrad, Adam, Ftrl")
    config, kind = inner.get_config(), type(inner).__name__
    is_new = type(inner).__module__.startswith("keras.")  # Keras 3 adds epsilon inside of the root
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay", "use_ema", "amsgrad"):
        if config.get(name):
            raise ConfigError("an option that tables do not have", where=kind, value=name)
    if kind == "SGD":
        return SGDSettings(momentum=config.get("momentum", 0.0), nesterov=config.get("nesterov", False))
    if kind == "Adagrad":
        return AdaGrad(
            initial_accumulator=config["initial_accumulator_value"], epsilon=config["epsilon"],
            epsilon_inside_root=is_new,
        )  # fmt: skip
    if kind in ("Adam", "LazyAdam"):
        return AdamSettings(beta1=config["beta_1"], beta2=config["beta_2"], epsilon=config["epsilon"], update="local")
    if kind == "Ftrl" and not config.get("initial_accumulator_value", 0.0):
        if config.get("learning_rate_power", -0.5) != -0.5 or config.get("l2_shrinkage_regularization_strength"):
            raise ConfigError("tables have FTRL with learning_rate_power=-0.5 and no shrinkage", where="Ftrl")
        return Ftrl(
            beta=config.get("beta", 0.0), lambda1=config["l1_regularization_strength"],
            lambda2=config["l2_regularization_strength"],
        )  # fmt: skip
    raise ConfigError(
        "tables do not have this optimizer's arithmetic", value=kind,
        allowed="SGD, Adagrad, Adam, Ftrl(initial_accumulator_value=0)",
    )  # fmt: skip
