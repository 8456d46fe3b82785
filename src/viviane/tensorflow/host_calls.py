"""Lookups as operations of TensorFlow: one call of the host for the rows, one for their gradients.

Shapes: B rows of the batch, N keys, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from viviane.core.errors import DataError
from viviane.core.optional import require
from viviane.embedding.external import LostUpdateError, root_weights, short_traceback, tensor_at
from viviane.tensorflow.arguments import fitting
from viviane.tensorflow.processes import size
from viviane.tensorflow.tables import Table

_P = ParamSpec("_P")
_R = TypeVar("_R")
_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
ANOTHER_OPTIMIZER: Final = (
    "pass its gradient to apply_gradients of a sok.OptimizerWrapper, and to other optimizers the variables of "
    "sok.filter_variables(...)[1] alone"
)


def tensorflow() -> Any:
    """Import TensorFlow, or name the extra that installs it."""
    return require("tensorflow", extra="tensorflow", purpose="viviane.tensorflow")


# AutoGraph leaves functions with this attribute as they are: of an import it warns that it has no source.
tensorflow.autograph_info__ = {}  # type: ignore[attr-defined]


def plain_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let AutoGraph leave a function as it is, when a script calls it inside of `tf.function`."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            result: _R = tensorflow().autograph.experimental.do_not_convert(function)(*args, **options)
        except TypeError:
            fitting(function.__name__, function, args, options)
            raise
        return result

    call.autograph_info__ = {}  # type: ignore[attr-defined]
    return call


def host_call(function: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Return `tf.numpy_function` of a function that may exchange with the other processes.

    TensorFlow runs calls of a graph that do not depend on each other at once, and in any order. Several processes
    would then exchange in different orders: they would wait for ever, or take one tensor for another. Over several
    processes each call therefore changes a variable before and after: such changes keep the script's order.
    """
    tf = tensorflow()
    if size() == 1 or tf.executing_eagerly():
        return tf.numpy_function(function, inputs, types)
    change = {"resource": _order().handle, "value": tf.zeros((), tf.int64)}
    with tf.control_dependencies([tf.raw_ops.AssignAddVariableOp(**change)]):
        out = tf.numpy_function(function, inputs, types)
    with tf.control_dependencies(as_list(out)):
        tf.raw_ops.AssignAddVariableOp(**change)
    return out


@cache
def _order() -> Any:
    tf = tensorflow()
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


class Parts(NamedTuple):
    """Keys (N,), row splits (B + 1,), weights (N,) or None, and what has to be equal of both where it is not known."""

    values: Any
    splits: Any
    weights: Any = None
    structures: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[Any]:
        """Return all, in the order in which the host takes them."""
        own = [] if self.weights is None else [self.weights]
        return [self.values, self.splits, *own, *self.structures]


class Lookup(NamedTuple):
    """What one variable of a call looks up.

    Args:
        table: of the variable.
        anchor: the number through which gradients reach the table, read now.
        trainable: whether its rows are to be updated.
        parts: keys and their rows of the batch.
        combiner: "sum", "mean" or "sqrtn".
    """

    table: Table
    anchor: Any
    trainable: bool
    parts: Parts
    combiner: str


def as_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy of an array of TensorFlow's, whose memory is gone when the call returns."""
    plain = np.ascontiguousarray(array)
    return tensor_at(plain.ctypes.data, _TYPES[str(plain.dtype)], plain.shape).clone()


def check_structures(ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
    """Refuse weights that have other row splits, indices or another shape than their ids."""
    if np.array_equal(ids, weights):
        return
    same = ids.shape == weights.shape
    at = int(np.flatnonzero((ids != weights).reshape(len(ids), -1).any(1))[0]) if same else "all"
    raise DataError(
        "weights are not placed as their ids", where="row splits, indices or shape, number " + str(at),
        value=(weights[at] if same else weights.shape), allowed=str(ids[at] if same else ids.shape),
        fix="make them of the ids: ids.with_values(weights), or tf.SparseTensor(ids.indices, weights, ids.dense_shape)",
    )  # fmt: skip


def check_anchor(value: float, table: Table) -> None:
    """Raise where an optimizer of TensorFlow's moved the variable itself: the rows have not moved then."""
    if value != 0.0:
        raise LostUpdateError(
            "another optimizer moved the variable, which moves no row", where=f"variable {table.config.name!r}",
            fix=ANOTHER_OPTIMIZER,
        )  # fmt: skip


def look_up(lookups: Sequence[Lookup], training: bool) -> list[Any]:
    """Pool rows of several variables: (B, D) each, in the type of the variable.

    Args:
        lookups: one for each variable.
        training: gradients may come.
    """
    tf = tensorflow()
    flat = [part for one in lookups for part in one.parts.tensors]
    tables = [one.table for one in lookups]
    recorded = _recorded()
    # Eagerly and outside of a tape nothing can be differentiated; inside of tf.function a caller's tape may come later.
    trains = training and any(one.trainable for one in lookups) and (recorded or not tf.executing_eagerly())
    types = [one.anchor.dtype for one in lookups]

    def shaped(rows: Sequence[Any]) -> list[Any]:
        for one, table in zip(rows, tables, strict=True):
            one.set_shape((None, table.config.dim))
        return [tf.cast(one, kind) for one, kind in zip(rows, types, strict=True)]

    if not trains:
        return shaped(as_list(host_call(_reader(lookups, training), flat, [tf.float32] * len(tables))))

    @tf.custom_gradient
    def train(*anchors: Any) -> Any:
        own = [tf.cast(one, tf.float32) for one in anchors]
        numbers, *rows = host_call(_beginner(lookups, recorded), [*own, *flat], [tf.int64, *[tf.float32] * len(tables)])

        def backward(*gradients: Any) -> Any:
            # The factor by which a script scales it: 1 for the first gradient of a step, whose rows wait in the table.
            wide = [tf.cast(one, tf.float32) for one in gradients]
            factors = as_list(host_call(_deliverer(lookups), [numbers, *wide], [tf.float32] * len(tables)))
            for one in factors:
                one.set_shape(())
            return [tf.cast(one, kind) for one, kind in zip(factors, types, strict=True)]

        return tuple(shaped(rows)), backward

    return as_list(train(*[one.anchor for one in lookups]))


def _unpacked(
    lookups: Sequence[Lookup], arrays: Sequence[Any]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str]]:
    """Return keys, offsets, weights and combiner of each lookup, of the arrays that the host was given."""
    rest = list(arrays)
    out: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, str]] = []
    for one in lookups:
        values, offsets = as_torch(rest.pop(0)), as_torch(rest.pop(0))
        weights = None if one.parts.weights is None else as_torch(rest.pop(0))
        if one.parts.structures:
            check_structures(rest.pop(0), rest.pop(0))
        if one.combiner == "sqrtn":
            weights = root_weights(offsets, weights, len(values))
        out.append((values, offsets, weights, _pooled(one.combiner)))
    return out


def _pooled(combiner: str) -> str:
    return "sum" if combiner == "sqrtn" else combiner  # its weights are divided by the root already


def _reader(lookups: Sequence[Lookup], add: bool) -> Callable[..., list[Any]]:
    @short_traceback
    def read(*arrays: Any) -> list[Any]:
        parts = _unpacked(lookups, arrays)
        return [one.table.read(*own, add=add).float().numpy() for one, own in zip(lookups, parts, strict=True)]

    return read


def _beginner(lookups: Sequence[Lookup], certain: bool) -> Callable[..., list[Any]]:
    @short_traceback
    def begin(*arrays: Any) -> list[Any]:
        anchors, rest = arrays[: len(lookups)], arrays[len(lookups) :]
        for one, anchor in zip(lookups, anchors, strict=True):
            check_anchor(float(anchor), one.table)
        numbers, rows = [], []
        for one, own in zip(lookups, _unpacked(lookups, rest), strict=True):
            number, found = one.table.begin(*own, certain=certain)
            numbers.append(number)
            rows.append(found.float().numpy())
        return [np.asarray(numbers, np.int64), *rows]

    return begin


def _deliverer(lookups: Sequence[Lookup]) -> Callable[..., list[Any]]:
    @short_traceback
    def deliver(numbers: Any, *gradients: Any) -> list[Any]:
        together = zip(lookups, numbers, gradients, strict=True)
        first = [one.table.deliver(int(n), as_torch(np.asarray(g)), _pooled(one.combiner)) for one, n, g in together]
        return [np.float32(one) for one in first]

    return deliver


def _recorded() -> bool:
    """Return whether a tape may record what is computed now."""
    from tensorflow.python.eager import record

    return bool(record.could_possibly_record())


def as_list(found: Any) -> list[Any]:
    """Return results as a list: TensorFlow gives a single one as it is, in some modes."""
    return list(found) if isinstance(found, list | tuple) else [found]
