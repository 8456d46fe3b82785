"""Options of fit: model.fit with the stock layer, with ours, and the fast form agree; what cannot be is refused."""

import warnings
from functools import cache

import keras
import numpy as np
from networks import BACKEND, KEYS, LABELS, SIZE, network

import viviane.keras as vk

_ROWS = 6 * SIZE - 5
_X, _Y = KEYS[:_ROWS], LABELS[:_ROWS]
_BINARY = (_Y > 0).astype("float32")
_SCALES = np.linspace(0, 2, _ROWS).astype("float32")
_VALID = (KEYS[-40:], LABELS[-40:])


class _Halve(keras.callbacks.Callback):
    """Sets the rate and looks at weights inside of an epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 * 0.5**batch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([float(np.abs(one).sum()) for one in self.model.layers[-1].get_weights()])


class _Data(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return KEYS[index * SIZE : (index + 1) * SIZE], LABELS[index * SIZE : (index + 1) * SIZE]


_LIST = [_Data()[i] for i in range(5)]


OPTIONS = {
    "epochs": lambda: {"epochs": 3, "initial_epoch": 1},
    "validation_split": lambda: {"validation_split": 0.3, "epochs": 2},
    "split_of_weighted": lambda: {"validation_split": 0.3, "sample_weight": _SCALES},
    "validation_data": lambda: {"validation_data": _VALID, "validation_freq": 2, "epochs": 2},
    "validation_steps": lambda: {"validation_data": _VALID, "validation_batch_size": 8, "validation_steps": 2},
    "validation_weights": lambda: {"validation_data": (*_VALID, np.linspace(0, 1, 40).astype("float32"))},
    "validation_set": lambda: {"validation_data": _Data(), "epochs": 2, "validation_freq": [2]},
    "class_weight": lambda: {"y": _BINARY, "class_weight": {0: 0.25, 1: 2.0}},
    "one_class_weight": lambda: {"y": _BINARY, "class_weight": {1: 3.0}},
    "sample_weight": lambda: {"sample_weight": _SCALES, "epochs": 2},
    "steps": lambda: {"steps_per_epoch": 4, "epochs": 2},
    "fewer_steps": lambda: {"steps_per_epoch": 3, "epochs": 2},
    "dataset": lambda: {"x": _Data(), "y": None, "epochs": 2, "batch_size": None, "shuffle": None},
    "list": lambda: {"x": _LIST, "y": None, "epochs": 2, "batch_size": None, "shuffle": None},
    "callbacks": lambda: {"callbacks": [_Halve()], "epochs": 2},
    "early_stop": lambda: {
        "callbacks": [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, restore_best_weights=True)],
        "epochs": 5,
    },
}  # fmt: skip


@cache
def _model(kind, form):
    """One model for all options: compiling one for each takes minutes."""
    optimizer = keras.optimizers.SGD(0.1)
    model, layer = network(kind, optimizer)
    model.compile(optimizer, "mse", metrics=["mae"], weighted_metrics=["mse"])
    rows, others = layer.get_weights(), [one.get_weights() for one in model.layers[1:] if one is not layer]
    return model, layer, rows, others


def _run(kind, form, options):
    model, layer, rows, others = _model(kind, form)
    layer.set_weights(rows)
    for one, weights in zip([one for one in model.layers[1:] if one is not layer], others, strict=True):
        one.set_weights(weights)
    model.optimizer.learning_rate = 0.1
    given = {"x": _X, "y": _Y, "batch_size": SIZE, "shuffle": False, "verbose": 0, **options()}
    if form == "fit" and given["shuffle"] is None:
        given |= {"shuffle": False, "x": _Data()}  # model.fit takes no list of batches
    train = model.fit if form == "fit" else lambda **own: vk.fit(model, **own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = train(**given)
    seen = [one.seen for one in given.get("callbacks", []) if isinstance(one, _Halve)]
    return layer.get_weights()[0], history.history, history.epoch, np.array(seen)


def fit_options():
    """Of each option: how far rows, figures and what a callback saw are from those of the stock layer."""
    found = {}
    for name, options in OPTIONS.items():
        if BACKEND != "torch" and name not in SOME:  # each costs two compilations
            continue
        rows, logs, epochs, _ = _run("stock", "fit", options)
        own = _run("own", "fit", options)
        fast = _run("own", "fast", options)
        found[name] = {
            "layer": _apart(own, rows, logs, epochs),
            "fast": _apart(fast, rows, logs, epochs),
            "seen": float(np.abs(own[3] - fast[3]).max(initial=0.0)),
            "epochs": len(epochs),
        }
    return found


def _apart(found, rows, logs, epochs):
    own_rows, own, own_epochs, _ = found
    if own.keys() != logs.keys() or own_epochs != epochs:
        return f"{sorted(own)} of epochs {own_epochs}, not {sorted(logs)} of {epochs}"
    apart = [np.abs(np.array(own[name]) - np.array(values)).max() for name, values in logs.items()]
    return float(max(*apart, np.abs(own_rows - rows).max()))


SOME = ("split_of_weighted", "validation_steps", "class_weight", "steps", "dataset", "callbacks", "early_stop")

REFUSED = {
    "class and sample weights": {"class_weight": {0: 1.0}, "sample_weight": _SCALES},
    "weights by class that are a list": {"class_weight": [1.0, 2.0]},
    "split and data": {"validation_split": 0.5, "validation_data": _VALID},
    "whole split": {"validation_split": 1.0},
    "split of NaN": {"validation_split": float("nan")},
    "split of a text": {"validation_split": "0.5"},
    "negative split": {"validation_split": -0.5},
    "split of a data set": {"x": _Data(), "y": None, "validation_split": 0.5},
    "frequency without data": {"validation_freq": 2},
    "frequency 0": {"validation_data": _VALID, "validation_freq": 0},
    "steps without data": {"validation_steps": 2},
    "one array to validate on": {"validation_data": (KEYS,)},
    "y beside a data set": {"x": _Data()},
    "weights beside a data set": {"x": _Data(), "y": None, "sample_weight": _SCALES},
    "batch size beside a data set": {"x": _Data(), "y": None, "batch_size": 8},
    "shuffle beside a data set": {"x": _Data(), "y": None, "shuffle": True},
    "weights by class beside sample weights of a data set": {
        "x": [(KEYS[:4], LABELS[:4], _SCALES[:4])],
        "y": None,
        "class_weight": {0: 1.0},
    },
    "lists of numbers": {"x": KEYS[:2].tolist()},
    "no data": {"x": None, "y": None},
    "no labels": {"y": None},
    "fewer labels": {"y": LABELS[:5]},
    "more labels": {"y": LABELS},
    "fewer weights": {"sample_weight": _SCALES[:5]},
    "batches without labels": {"x": [KEYS[:4]], "y": None},
    "a generator for two epochs": {"x": iter([(KEYS[:4], LABELS[:4])]), "y": None, "epochs": 2},
    "no batches": {"x": [], "y": None},
    "batch size 0": {"batch_size": 0},
    "steps 0": {"steps_per_epoch": 0},
    "epochs -1": {"epochs": -1},
    "epochs 1.5": {"epochs": 1.5},
    "prefetch -1": {"prefetch": -1},
    "verbosity 3": {"verbose": 3},
}


class _OwnStep(keras.Model):
    def train_step(self, *args, **options):
        raise AssertionError


class _OwnCall(keras.Model):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def fit_refusals():
    """The error of each; "" where nothing was raised."""
    optimizer = keras.optimizers.SGD(0.1)
    model, _ = network("own", optimizer)
    model.compile(optimizer, "mse")
    found = {name: _raised(lambda given=given: _fast(model, given)) for name, given in REFUSED.items()}
    for name, kind in {"own step": _OwnStep, "own call": _OwnCall}.items():
        other = kind(model.inputs, model.outputs)
        other.compile(keras.optimizers.SGD(0.1), "mse")
        found[name] = _raised(lambda other=other: _fast(other, {}))
    other, _ = network("own", optimizer, activity_regularizer="l2")
    other.compile(optimizer, "mse")
    found["regularizer of the output"] = _raised(lambda: _fast(other, {}))
    model.compile(optimizer, "mse", steps_per_execution=2)
    found["several steps a call"] = _raised(lambda: _fast(model, {}))
    return found


def _fast(model, given):
    vk.fit(model, **{"x": _X, "y": _Y, "verbose": 0, **given})


def _raised(call):
    from viviane.core.errors import VivianeError

    try:
        call()
    except VivianeError as error:
        return str(error)
    except Exception as error:
        return f"NOT OURS: {error!r}"
    return ""
