"""The fast form: rows go into the compiled step, and their gradients come out of it.

The layers' lookups happen before the step and their updates after it; nothing calls the host from compiled code. The
numbers are those of `model.fit`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import keras

from viviane.core.errors import ConfigError
from viviane.keras.backends import input_structure
from viviane.keras.feeding import EpochFeed, batch_list, is_arrays, split_samples
from viviane.keras.graph import KeyReader, Rest
from viviane.keras.keys import refuse_uneven_rows
from viviane.keras.layer import TableLayer, table_layers

_BATCH_SIZE: Final = 32
_KEPT: Final = "_viviane_trainer"


class FastTrainer:
    """Steps of a compiled functional model whose table lookups lie outside of the compiled code.

    Args:
        model: functional or Sequential, compiled; each table layer is called once in it. Inputs of table layers may be
            computed, by layers without weights, from the model's inputs; where they are inputs themselves 64-bit keys
            stay whole.
        jit_compile: whether XLA (on torch its compiler) compiles the step; None: on JAX unless `compile` forbade it, on
            TensorFlow and torch if `compile` asked for it. With `run_eagerly` in `compile` nothing is compiled.

    Raises:
        ConfigError: the model is of another kind.

    Example:
        >>> import numpy as np
        >>> import viviane.keras as vk
        >>> keys = keras.Input((2,), dtype="int32")
        >>> rows = vk.Embedding(10, 4, optimizer=keras.optimizers.SGD(0.1))(keys)
        >>> model = keras.Model(keys, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> logs = FastTrainer(model).train_on_batch(np.array([[1, 2]]), np.array([[1.0]]))
        >>> sorted(logs)
        ['loss']
    """

    def __init__(self, model: Any, *, jit_compile: bool | None = None) -> None:
        self.model = model
        self.layers = _checked_layers(model)
        _check_model(model, jit_compile)
        for layer in self.layers:
            if layer.rule.rate is None:
                layer.follow(model.optimizer)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        backend = import_module(f"viviane.keras.backends.{keras.backend.backend()}_steps")
        self._steps = backend.Steps(model, Rest(model, self.layers), self.layers, jit_compile)
        self._keys = KeyReader(model, self.layers, self._steps.function_of)

    def train_on_batch(self, x: Any, y: Any, sample_weight: Any = None) -> dict[str, float]:
        """Train on a batch, and return the metrics since `reset_metrics`."""
        logs = self.step(x, y, sample_weight)
        self.sync()
        return {name: float(value) for name, value in logs.items()}

    def step(self, x: Any, y: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Train on a batch; metrics are of the backend's own type. `sync` puts the weights into the model."""
        inputs = self._inputs(x)
        flats, numbers = [], []
        for layer, (batch, shape) in zip(self.layers, self._keys.batches(inputs), strict=True):
            layer.forget_losses()  # of `model.fit`, with loss scaling: its graph would be differentiated again
            number, flat = layer.lookups.begin(batch)
            numbers.append(number)
            flats.append(layer.step_input(flat, shape))
        try:
            logs, gradients, rates, scale = self._steps.train(inputs, flats, y, sample_weight)
        except BaseException:
            for layer in self.layers:
                layer.lookups.discard()
            raise
        for layer, number, own, rate in zip(self.layers, numbers, gradients, rates, strict=True):
            matrix = own if own.dim() == 2 else own.reshape(-1, own.shape[-1])
            layer.lookups.end(number, matrix, rate, 1.0 / scale)
        return logs  # type: ignore[no-any-return]

    def sync(self) -> None:
        """Put the weights of the last step into the model's variables."""
        self._steps.sync()

    def refresh(self) -> None:
        """Read the weights from the model's variables again, which a callback may have set."""
        self._steps.refresh()

    def _inputs(self, x: Any) -> list[Any]:
        if isinstance(x, dict):
            wanted = input_structure(self.model)
            names = list(wanted) if isinstance(wanted, dict) else [one.name for one in keras.tree.flatten(wanted)]
            missing = [name for name in names if name not in x]
            if missing:
                raise ConfigError("the data lack an input", value=", ".join(missing), allowed=", ".join(map(str, x)))
            x = {name: x[name] for name in names} if isinstance(wanted, dict) else [x[name] for name in names]
        flat = [x] if hasattr(x, "shape") else list(keras.tree.flatten(x))
        if len(flat) != self._keys.num_inputs:
            raise ConfigError("inputs are not the model's", value=len(flat), allowed=str(self._keys.num_inputs))
        return flat


def _checked_layers(model: Any) -> list[TableLayer]:
    layers = table_layers(model)
    if not layers:
        raise ConfigError("the model has no table layers", fix="use model.fit")
    is_graph = hasattr(model, "operations") or isinstance(model, keras.Sequential)
    if not is_graph or not getattr(model, "inputs", None):
        raise ConfigError(
            "the fast form needs a functional model, or a Sequential that begins with keras.Input",
            value=type(model).__name__, fix="build it as keras.Model(inputs, outputs), or use model.fit",
        )  # fmt: skip
    for layer in layers:
        if layer not in model.layers or len(layer._inbound_nodes) != 1:
            raise ConfigError(
                "the fast form needs each table layer to be called once, by the model itself", where=layer.where,
                fix="use model.fit; a Sequential gets its layers as one list, since add() calls all of them again",
            )  # fmt: skip
        if not layer.trainable:
            raise ConfigError("a frozen table layer has no fast form", where=layer.where, fix="use model.fit")
        if layer.activity_regularizer is not None:
            raise ConfigError(
                "the fast form has no activity regularizer of a table layer", where=layer.where,
                value=type(layer.activity_regularizer).__name__,
                fix="use model.fit, or put keras.layers.ActivityRegularization behind the layer",
            )  # fmt: skip
    return layers


def _check_model(model: Any, jit_compile: bool | None) -> None:
    """Refuse what `model.fit` would do and the fast form would leave out."""
    if model.optimizer is None:
        raise ConfigError("the model is not compiled", fix="call model.compile(optimizer, loss) first")
    for name in ("train_step", "call"):
        owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] != "keras":
            raise ConfigError(
                f"the model has a {name} of its own, which the fast form would not run", value=owner.__name__,
                fix="use model.fit",
            )  # fmt: skip
    if model.steps_per_execution > 1:
        raise ConfigError(
            "the fast form makes one step a call", where="compile(steps_per_execution=...)",
            value=model.steps_per_execution, allowed="1", fix="leave it out of compile, or use model.fit",
        )  # fmt: skip
    if jit_compile and model.run_eagerly:
        raise ConfigError("run_eagerly and jit_compile=True exclude each other", fix="leave one of them out")


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | None = None,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
    jit_compile: bool | None = None,
    prefetch: int = 2,
    seed: int = 0,
) -> Any:
    """Train as `model.fit` does, with the tables' lookups and updates around the step, which is compiled once.

    Args:
        model: see `FastTrainer`.
        x, y, sample_weight: arrays; or x alone: a PyDataset such as `batches(...)`, or an iterable of (x, y) or
            (x, y, sample_weight) that can be read once an epoch.
        batch_size: of arrays; None: 32.
        shuffle: arrays; None: they are. Data sets give their own order.
        seed: of the order of arrays.
        epochs, initial_epoch, verbose, callbacks, class_weight, validation_split, validation_data, validation_steps,
            validation_batch_size, validation_freq: as of `model.fit`.
        steps_per_epoch: batches of an epoch; the next epoch continues where this one stopped.
        jit_compile: see `FastTrainer`.
        prefetch: batches that a thread prepares ahead; 0 prepares none.

    Returns:
        Keras' History.

    Raises:
        ConfigError: an option is out of range, or has no meaning for these data.
    """
    trainer = _trainer_of(model, jit_compile)
    _check_numbers(
        batch_size=batch_size, steps_per_epoch=steps_per_epoch, validation_steps=validation_steps,
        validation_batch_size=validation_batch_size, epochs=epochs, initial_epoch=initial_epoch, prefetch=prefetch,
    )  # fmt: skip
    x = batch_list(x, y)
    _check_data(x, y, sample_weight, batch_size, shuffle, class_weight)
    if validation_split:
        if validation_data is not None:
            raise ConfigError("validation_split and validation_data exclude each other", fix="leave one of them out")
        (x, y, sample_weight), validation_data = split_samples((x, y, sample_weight), validation_split)
    valid = _Validation(
        validation_data, validation_batch_size or batch_size or _BATCH_SIZE, validation_steps, validation_freq
    )
    feed = EpochFeed(
        x, y, sample_weight, batch_size=batch_size or _BATCH_SIZE, shuffle=shuffle is not False, seed=seed,
        class_weight=class_weight, steps=steps_per_epoch, ahead=prefetch,
    )  # fmt: skip
    calls = _callbacks(model, callbacks, verbose, epochs, feed.num_steps)
    model.stop_training = False
    calls.on_train_begin()
    logs: dict[str, Any] = {}
    try:
        for epoch in range(initial_epoch, epochs):
            model.reset_metrics()
            calls.on_epoch_begin(epoch)
            trainer.refresh()
            logs = _epoch(trainer, feed.epoch(), calls)
            logs |= valid.figures(model, epoch)
            calls.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
    finally:
        feed.close()
    calls.on_train_end(logs)
    return model.history


def _trainer_of(model: Any, jit_compile: bool | None) -> FastTrainer:
    """Return the trainer of the last call, whose step is compiled, where nothing that the step contains is another."""
    before, trainer = vars(model).get(_KEPT, ((), None))
    parts = _parts_of_step(model, jit_compile)
    if trainer is not None and len(parts) == len(before) and all(map(operator.is_, parts, before)):
        return trainer  # type: ignore[no-any-return]
    trainer = FastTrainer(model, jit_compile=jit_compile)
    # Not by setattr, which Keras and torch watch for layers.
    vars(model)[_KEPT] = _parts_of_step(model, jit_compile), trainer  # by now its layers follow an optimizer
    return trainer


def _parts_of_step(model: Any, jit_compile: bool | None) -> tuple[Any, ...]:
    """Return what a compiled step is made of: other objects make another step."""
    compiled = (model.optimizer, model.loss, model._compile_loss, model._compile_metrics)
    options = (jit_compile, model.jit_compile, model.run_eagerly, model.steps_per_execution)
    rules = (layer.rule for layer in table_layers(model))
    return (*compiled, *options, *rules, *model.trainable_variables)


class _Validation:
    """The evaluation after an epoch."""

    def __init__(self, data: Any, batch_size: int, steps: int | None, freq: int | Collection[int]) -> None:
        if isinstance(data, tuple | list) and len(data) not in (2, 3):
            raise ConfigError(
                "validation_data has another form",
                value=f"{len(data)} parts",
                allowed="(x, y), (x, y, sample_weight) or a data set",
            )
        if data is None and (steps is not None or freq != 1):
            raise ConfigError(
                "validation_steps and validation_freq need validation data", fix="pass validation_data=..."
            )
        if isinstance(freq, bool) or (isinstance(freq, int) and freq < 1) or not isinstance(freq, int | Collection):
            raise ConfigError("not a frequency", where="validation_freq", value=freq, allowed="1, 2, ... or epochs")
        self._data, self._batch_size, self._steps, self._freq = data, batch_size, steps, freq

    def figures(self, model: Any, epoch: int) -> dict[str, Any]:
        """Return loss and metrics after an epoch, if it is one to evaluate after."""
        number = epoch + 1
        due = number % self._freq == 0 if isinstance(self._freq, int) else number in self._freq
        if self._data is None or not due:
            return {}
        options: dict[str, Any] = {"steps": self._steps, "verbose": 0, "return_dict": True}
        if isinstance(self._data, tuple | list):
            x, y, *rest = self._data
            found = model.evaluate(
                x, y, sample_weight=rest[0] if rest else None, batch_size=self._batch_size, **options
            )
        else:
            found = model.evaluate(self._data, **options)
        return {f"val_{name}": value for name, value in found.items()}


def _check_numbers(**given: int | None) -> None:
    for name, value in given.items():
        least = 0 if name in ("epochs", "initial_epoch", "prefetch") else 1
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ConfigError("not a count", where=name, value=value, allowed=f"whole numbers from {least}")


def _check_data(x: Any, y: Any, weight: Any, batch_size: int | None, shuffle: bool | None, class_weight: Any) -> None:
    if x is None:
        raise ConfigError("no data to train on", where="x", fix="pass x and y, or a data set of batches")
    for part in keras.tree.flatten(x) if isinstance(x, dict | list | tuple) else [x]:
        refuse_uneven_rows(part, "x")
    if class_weight is not None and weight is not None:
        raise ConfigError(
            "class_weight and sample_weight exclude each other", fix="multiply the sample weights by those of classes"
        )
    if class_weight is not None and not isinstance(class_weight, Mapping):
        raise ConfigError("not weights by class", where="class_weight", value=type(class_weight).__name__,
                          allowed="a dict: {class: weight}")  # fmt: skip
    if is_arrays(x):
        return
    given = {"y": y is not None, "sample_weight": weight is not None, "batch_size": batch_size is not None,
             "shuffle": bool(shuffle)}  # fmt: skip
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(
            "the data are batches, which bring this themselves", where="fit", value=", ".join(wrong),
            fix="leave it out, or pass arrays: lists of numbers become arrays by numpy.array",
        )  # fmt: skip


def _callbacks(model: Any, given: Any, verbose: int | str, epochs: int, steps: int | None) -> Any:
    if verbose not in ("auto", 0, 1, 2):
        raise ConfigError("no such verbosity", where="verbose", value=verbose, allowed="'auto', 0, 1, 2")
    if isinstance(given, keras.callbacks.CallbackList):
        return given
    shown = 1 if verbose == "auto" else verbose
    return keras.callbacks.CallbackList(
        given, add_history=True, add_progbar=shown != 0, model=model, verbose=shown, epochs=epochs, steps=steps
    )


def _epoch(trainer: FastTrainer, feed: Iterator[Any], calls: Any) -> dict[str, Any]:
    logs: dict[str, Any] = {}
    watched = any(_watches_batches(one) for one in calls.callbacks)
    try:
        for number, batch in enumerate(feed):
            calls.on_train_batch_begin(number)
            if watched:  # it may have set a rate or weights
                trainer.refresh()
            logs = trainer.step(*batch)
            if watched:  # it may save or read weights
                trainer.sync()
            calls.on_train_batch_end(number, logs)
            if trainer.model.stop_training:
                break
    finally:
        trainer.sync()
    return {name: float(value) for name, value in logs.items()}


def _watches_batches(callback: Any) -> bool:
    if isinstance(callback, keras.callbacks.ProgbarLogger | keras.callbacks.History):
        return False
    plain = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(plain, name)
        for name in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    )
