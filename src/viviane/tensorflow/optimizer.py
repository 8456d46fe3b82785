"""`OptimizerWrapper`: update the rows behind variables by the arithmetic of an optimizer of TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

import numpy as np

from viviane.config.optimizers import SGD as SGDSettings  # noqa: N811 - SOK has an SGD, too
from viviane.config.optimizers import Adadelta, AdaGrad, Adamax, AnyOptimizer, Ftrl, RMSProp
from viviane.config.optimizers import Adam as AdamSettings
from viviane.core.errors import ConfigError
from viviane.embedding.external import checked_rate, short_traceback
from viviane.ops.row_update import initial_state
from viviane.tensorflow.arguments import number, pairs_of
from viviane.tensorflow.host_calls import host_call, plain_python, tensorflow
from viviane.tensorflow.table_variable import has_table, table_of

_SLOTS: Final = {
    "Ftrl": {"n": "accumulator", "z": "linear"}, "RMSProp": {"accumulator": "rms"}, "Adamax": {"u": "v"},
    "Adadelta": {"accumulator": "accum_grad", "steps": "accum_var"},
}  # fmt: skip
"""By optimizer: states that TensorFlow gives other names."""


class SGD:
    """SOK's own optimizer: w -= lr g.

    Args:
        lr: the rate, which becomes a variable; or a schedule.
    """

    def __init__(self, lr: Any) -> None:
        self._rate: Any = None
        self._wrapper: OptimizerWrapper | None = None
        self.lr = lr

    @property
    def lr(self) -> Any:
        """The rate: a variable, so that one that is set later counts inside of tf.function too."""
        return self._rate

    @lr.setter
    def lr(self, value: Any) -> None:
        tf = tensorflow()
        if callable(value) or isinstance(value, tf.Variable):
            self._rate = value
        elif isinstance(self._rate, tf.Variable):
            self._rate.assign(value)
        else:
            with tf.init_scope():
                self._rate = tf.Variable(number("lr", value, float), dtype=tf.float32, trainable=False)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Update the tables of the variables, as `OptimizerWrapper` does."""
        if self._wrapper is None:
            self._wrapper = OptimizerWrapper(self)
        return self._wrapper.apply_gradients(grads_and_vars, global_step, name)


class OptimizerWrapper:
    """Update tables by an optimizer of Keras 3, tf_keras or `SGD`; rows without gradient rest.

    Args:
        optimizer: SGD, Adagrad, Adam (as LazyAdam: touched rows alone), Adamax, Adadelta, RMSprop (touched rows alone)
            or Ftrl.

    Raises:
        ConfigError: tables do not have its arithmetic.
    """

    def __new__(cls, optimizer: Any = None, *args: Any, **options: Any) -> Any:
        """Return a wrapper that Keras 2's LossScaleOptimizer takes, where one of Keras 2's optimizers is wrapped."""
        kind = _keras_base(optimizer)
        if cls is OptimizerWrapper and kind is not None:
            return object.__new__(_keras_wrapper(kind))
        return object.__new__(cls)

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.settings = _settings(optimizer)
        self._steps: Any = None

    def around(self, optimizer: Any) -> OptimizerWrapper:
        """Return a wrapper around another optimizer, with the same arithmetic for tables."""
        made = OptimizerWrapper(optimizer)
        made.settings = self.settings
        return made

    @property
    def lr(self) -> Any:
        """The learning rate at present; a variable of the optimizer where it has one, to be assigned."""
        return self._rate()

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def learning_rate(self) -> Any:
        """The same."""
        return self._rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        setattr(self.optimizer, "lr" if isinstance(self.optimizer, SGD) else "learning_rate", value)

    @plain_python
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None, **_: Any
    ) -> Any:
        """Update the tables of the variables.

        A gradient is the factor by which the script multiplied what `GradientTape.gradient` gave: 1, or 1 / scale under
        loss scaling. The rows' gradients wait in the tables.
        """
        tf = tensorflow()
        del global_step, name
        given = [(gradient, variable) for gradient, variable in pairs_of(grads_and_vars) if gradient is not None]
        pairs = [pair for pair in given if has_table(pair[1])]
        if rest := [pair for pair in given if not has_table(pair[1])]:
            self._apply_to_others(rest)
            if not pairs:
                return None
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
                table.step(self.settings, checked_rate(rate, "OptimizerWrapper"), _factor(factor))
            return np.int64(0)

        steps = self.iterations
        rate = tf.cast(self._rate(), tf.float32)
        factors = [_as_factor(one) for one, _ in pairs]
        done = host_call(step, [rate, *factors], tf.int64)
        with tf.control_dependencies([done]):
            return tf.group(steps.assign_add(1))

    @property
    def iterations(self) -> Any:
        """The number of steps of the wrapper, by which schedules go: a variable."""
        tf = tensorflow()
        if self._steps is None:
            with tf.init_scope():
                self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        return self._steps

    @property
    def num_steps(self) -> int:
        """The same as a number, or the optimizer's own where it has made more; eagerly alone."""
        own = 0 if self._steps is None else int(self._steps)
        return max(own, int(getattr(self.optimizer, "iterations", 0)))

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.iterations.assign(value)

    def _apply_to_others(self, pairs: list[tuple[Any, Any]]) -> None:
        """Update variables of TensorFlow's own by the optimizer itself."""
        tf = tensorflow()
        for _, variable in pairs:
            if not isinstance(variable, tf.Variable) and not hasattr(variable, "assign"):
                table_of(variable)  # raises
        if not isinstance(self.optimizer, SGD):
            self.optimizer.apply_gradients(pairs)
            return
        for gradient, variable in pairs:
            rate = tf.cast(self._rate(), variable.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
            else:
                variable.assign_sub(rate * gradient)

    def _rate(self) -> Any:
        rate = getattr(self.optimizer, "learning_rate", None)
        rate = getattr(self.optimizer, "lr", None) if rate is None else rate
        hidden = getattr(self.optimizer, "_learning_rate", None)
        if callable(hidden):  # a schedule of Keras 3, whose own steps are those of the dense variables
            rate = hidden
        return rate(0 if self._steps is None else self._steps) if callable(rate) else rate

    def get_slot_names(self) -> list[str]:
        """Return the names of the optimizer's state."""
        return [self.slot_name(one) for one in initial_state(self.settings)]

    def get_slot(self, variable: Any, slot_name: str) -> Any:
        """Return a table's state (N, D), in the order of `export`.

        Raises:
            ConfigError: the optimizer has no such state, or has not updated the variable.
        """
        for name, part in table_of(variable).state().items():
            if slot_name in (name, self.slot_name(name)):
                return tensorflow().constant(part.numpy())
        raise ConfigError("no such state", where=f"variable {table_of(variable).config.name!r}", value=slot_name,
                          allowed=", ".join(self.get_slot_names()) or "none", fix="apply gradients first")  # fmt: skip

    def slot_name(self, state: str) -> str:
        """Return what TensorFlow and SOK's files call a state of a table."""
        return _SLOTS.get(type(self.settings).__name__, {}).get(state, state)


def _as_factor(given: Any) -> Any:
    """Return what a table's gradients are multiplied by, float32: the gradient of its variable stands for it."""
    tf = tensorflow()
    try:
        made = tf.convert_to_tensor(given)
        if made.dtype.is_floating or made.dtype.is_integer:
            return tf.cast(made, tf.float32)
    except (TypeError, ValueError):
        pass  # refused below, as a tensor of another type is
    raise _no_gradient(type(given).__name__)


def _factor(given: Any) -> float:
    if np.size(given) != 1:
        raise _no_gradient(f"shape {np.shape(given)}")
    return float(np.reshape(given, ()))


def _no_gradient(value: str) -> ConfigError:
    return ConfigError(
        "not the gradient of a table's variable", where="OptimizerWrapper, grads_and_vars", value=value,
        allowed="what the tape gives for the variable, or a multiple of it",
    )  # fmt: skip


def _keras_base(optimizer: Any) -> Any:
    """Return the class of optimizers that Keras 2's LossScaleOptimizer takes; None where this is none of Keras 2."""
    if not any(one.__module__.startswith("tf_keras.") for one in type(optimizer).__mro__):
        return None
    return tensorflow().keras.optimizers.legacy.Optimizer


@cache
def _keras_wrapper(base: Any) -> Any:
    """Return the wrapper as a subclass of an optimizer of Keras 2, whose own means are not used."""

    class KerasOptimizerWrapper(OptimizerWrapper, base):
        def __init__(self, optimizer: Any) -> None:
            base.__init__(self, "OptimizerWrapper")
            OptimizerWrapper.__init__(self, optimizer)

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def __dir__(self) -> list[str]:
            # TensorFlow's checkpoints ask whatever lists this for the slots of every object; they are no variables.
            return [name for name in super().__dir__() if name != "get_slot_names"]

        def get_config(self) -> dict[str, Any]:
            return dict(self.optimizer.get_config())

    return KerasOptimizerWrapper


class Adam(OptimizerWrapper):
    """SOK 1.x's Adam: rows without gradient are moved by their momentum when they are touched next.

    Args:
        learning_rate, beta_1, beta_2, epsilon: as of tf.keras' Adam.
    """

    def __new__(
        cls, learning_rate: Any = 1e-3, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7, **_: Any
    ) -> Any:
        """Return the wrapper, which Keras 2's LossScaleOptimizer takes under Keras 2."""
        plain = tensorflow().keras.optimizers.Adam(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
        made = OptimizerWrapper(plain)
        made.settings = made.settings.model_copy(update={"update": "lazy_global"})
        return made


_KNOWN: Final = "SGD, Adagrad, Adam, Adamax, Adadelta, RMSprop, Ftrl"


def _settings(optimizer: Any) -> AnyOptimizer:
    if isinstance(optimizer, SGD):
        return SGDSettings()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner).__name__
    if not hasattr(inner, "get_config"):
        fix = f"pass one of tf.keras.optimizers in the place of tf.compat.v1.train.{kind}"
        of_version_1 = type(inner).__module__.startswith("tensorflow.python.training")
        raise ConfigError("not an optimizer", value=kind, allowed=_KNOWN, fix=fix if of_version_1 else None)
    config = inner.get_config()
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay", "use_ema", "amsgrad", "centered"):
        if config.get(name):
            raise ConfigError("an option that tables do not have", where=kind, value=name)
    make = _MAKERS.get(kind)
    if make is None:
        raise ConfigError("tables do not have this optimizer's arithmetic", value=kind, allowed=_KNOWN)
    made: AnyOptimizer = make(config, not _is_legacy(inner))
    return made


def _is_legacy(optimizer: Any) -> bool:
    """Return whether an optimizer adds epsilon to the root, and not below it: those of Keras 2 before 2.11."""
    old = getattr(tensorflow().keras.optimizers, "legacy", None)
    return isinstance(optimizer, getattr(old, "Optimizer", ()))


def _sgd(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    return SGDSettings(momentum=config.get("momentum", 0.0), nesterov=config.get("nesterov", False))


def _adagrad(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    start, epsilon = config["initial_accumulator_value"], config["epsilon"]
    return AdaGrad(initial_accumulator=start, epsilon=epsilon, epsilon_inside_root=inside)


def _adam(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    return AdamSettings(beta1=config["beta_1"], beta2=config["beta_2"], epsilon=config["epsilon"], update="local")


def _adamax(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    return Adamax(beta1=config["beta_1"], beta2=config["beta_2"], epsilon=config["epsilon"])


def _adadelta(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    return Adadelta(decay=config["rho"], epsilon=config["epsilon"])


def _rmsprop(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    if config.get("momentum"):
        raise ConfigError("an option that tables do not have", where="RMSprop", value="momentum")
    return RMSProp(decay=config["rho"], epsilon=config["epsilon"], epsilon_inside_root=inside)


def _ftrl(config: dict[str, Any], inside: bool) -> AnyOptimizer:
    if config.get("learning_rate_power", -0.5) != -0.5 or config.get("l2_shrinkage_regularization_strength"):
        raise ConfigError("tables have FTRL with learning_rate_power=-0.5 and no shrinkage", where="Ftrl")
    return Ftrl(
        initial_accumulator=config.get("initial_accumulator_value", 0.0), beta=config.get("beta", 0.0),
        lambda1=config["l1_regularization_strength"],
        lambda2=2.0 * config["l2_regularization_strength"],  # Keras' is that of l2 w^2
    )  # fmt: skip


_MAKERS: Final[dict[str, Callable[[dict[str, Any], bool], AnyOptimizer]]] = {
    "SGD": _sgd, "Adagrad": _adagrad, "Adam": _adam, "LazyAdam": _adam, "Adamax": _adamax, "Adadelta": _adadelta,
    "RMSprop": _rmsprop, "Ftrl": _ftrl,
}  # fmt: skip
