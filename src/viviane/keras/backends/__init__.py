"""One file for each of Keras' backends: how a lookup and its update get into that framework's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import keras

from viviane.core.errors import ConfigError

_NAMES = ("torch", "jax", "tensorflow")


class Backend(Protocol):
    """What a backend's file has."""

    def look_up(self, layer: Any, keys: Any, weights: Any, rate: Any, trains: bool) -> tuple[Any, Any]:
        """Look up a matrix of keys (B, K): the vectors (B, W), and a zero whose gradient is the loss scale."""

    def whole_keys(self, keys: Any, where: str) -> Any:
        """Return floats or unsigned numbers as int32 or int64, checked; by a call of the host in compiled code."""

    def joined_keys(self, parts: Sequence[Any], lengths: Sequence[int | None]) -> Any:
        """Return keys of several features, (B,) or (B, L) each, as a matrix (B, K) at once; None: one by one.

        Where the framework runs the layer in Python, and all of them are of one type that needs no check.
        """

    def split(self, flat: Any, widths: Sequence[int]) -> Sequence[Any]:
        """Split (B, W) by columns so that backward joins the gradients; that of a slice would be as wide as (B, W)."""

    def is_traced(self, anchor: Any) -> bool:
        """Whether a model is computing, for its compiled step or its gradients, given a variable of a layer."""

    def eagerly(self, device: str) -> AbstractContextManager[Any]:
        """Compute at once for a block, even where the framework is tracing, on the device of the tables."""

    def table_device(self, weight: Any) -> str:
        """Return the device of the tables of a layer, given a weight of it."""


def backend_of() -> Backend:
    """Return the file of Keras' present backend.

    Raises:
        ConfigError: there is none for it.
    """
    return _loaded(keras.backend.backend())


@cache
def _loaded(name: str) -> Backend:
    if name not in _NAMES:
        raise ConfigError("no layers for this backend of Keras", value=name, allowed=", ".join(_NAMES))
    return import_module(f"viviane.keras.backends.{name}_backend")


def input_structure(model: Any) -> Any:
    """Return a model's symbolic inputs in the structure in which it takes data: one, a list, or a dict.

    Example:
        >>> input_structure(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])).shape
        (None, 2)
    """
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def table_device(weight: Any) -> str:
    """Return the device of the tables of a layer, given a weight of it."""
    return backend_of().table_device(weight)
