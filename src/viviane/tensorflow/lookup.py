"""`lookup_sparse`: pool rows of several variables in one call of the host.

Shapes: B rows of the batch, N keys, D numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from viviane.core.errors import ConfigError, DataError
from viviane.embedding.external import short_traceback, tensor_at
from viviane.tensorflow.arguments import listed, optional
from viviane.tensorflow.tables import Table
from viviane.tensorflow.variables import plain_python, table_of, tensorflow

_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class _Parts(NamedTuple):
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


def _as_torch(array: np.ndarray[Any, Any]) -> torch.Tensor:
    plain = np.ascontiguousarray(array)
    return tensor_at(plain.ctypes.data, _TYPES[str(plain.dtype)], plain.shape).clone()


@plain_python
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool = True,
) -> Any:
    """Pool the rows of keys: (B, D), one for each variable.

    Args:
        params: a variable, or a list.
        sp_ids: for each, a tf.RaggedTensor or tf.SparseTensor of rank 2, int32 or int64; a dense matrix too.
        sp_weights: for each, float32, with the row splits or indices of its ids; a mean is divided by their sum.
        combiners: for each, "sum" or "mean" (default); or one for all.
        use_low_frequency_filter: keys are admitted by the variable's filter_ratio, with either value.

    Raises:
        ConfigError, DataError: lists of different lengths, other types, weights that are not one for each key.
            Inside of tf.function TensorFlow raises the last, with the same text.
    """
    single = not isinstance(params, list | tuple)
    variables, ids = ([params], [sp_ids]) if single else (list(params), listed("sp_ids", sp_ids))
    if isinstance(combiners, list | tuple) and isinstance(combiners[0] if combiners else None, int):
        raise ConfigError("hotness is not needed", fix="call lookup_sparse(params, sp_ids, combiners=...)")
    if not isinstance(combiners, list | tuple):
        optional("combiners", combiners, str)
    names = list(combiners) if isinstance(combiners, list | tuple) else [combiners or "mean"] * len(variables)
    weights = (
        [None] * len(variables) if sp_weights is None else [sp_weights] if single else listed("sp_weights", sp_weights)
    )
    if not len(variables) == len(ids) == len(names) == len(weights):
        counts = f"{len(variables)}, {len(ids)}, {len(weights)}, {len(names)}"
        raise ConfigError("variables, ids, weights and combiners are as many", value=counts)
    for name in names:
        if not isinstance(name, str) or name not in ("sum", "mean"):
            raise ConfigError("no such combiner", value=name, allowed="'sum', 'mean'")
    del use_low_frequency_filter
    tables = [table_of(one) for one in variables]
    given = [_parts(one, own) for one, own in zip(ids, weights, strict=True)]
    found = _look_up(variables, tables, given, names, training)
    return found[0] if single else found


def _parts(ids: Any, weights: Any) -> _Parts:
    tf = tensorflow()
    values, splits = _values(ids)
    if values.dtype not in (tf.int32, tf.int64):
        raise DataError("keys are int32 or int64", value=values.dtype.name)
    if weights is None:
        return _Parts(values, splits)
    own = tf.cast(_values(weights)[0], tf.float32)
    return _Parts(values, splits, own, _structures(ids, weights))


def _structures(ids: Any, weights: Any) -> tuple[Any, ...]:
    """Return what places keys and weights in their rows, to be compared when it is known; () where it is the same."""
    tf = tensorflow()
    kinds = [_kind_of(one) for one in (ids, weights)]
    if kinds[0] != kinds[1]:
        raise DataError("weights have another form than their ids", value=kinds[1], allowed=kinds[0])
    if isinstance(ids, tf.RaggedTensor):
        pair = (ids.row_splits, weights.row_splits)
    elif isinstance(ids, tf.SparseTensor):
        pair = (ids.indices, weights.indices)
    else:
        pair = (tf.shape(ids), tf.shape(weights))
    if pair[0] is pair[1]:
        return ()
    if tf.executing_eagerly():
        _check_structures(*(one.numpy() for one in pair))
        return ()
    return pair


def _kind_of(given: Any) -> str:
    tf = tensorflow()
    if isinstance(given, tf.RaggedTensor):
        return "RaggedTensor"
    return "SparseTensor" if isinstance(given, tf.SparseTensor) else "matrix"


def _check_structures(ids: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
    if np.array_equal(ids, weights):
        return
    same = ids.shape == weights.shape
    at = int(np.flatnonzero((ids != weights).reshape(len(ids), -1).any(1))[0]) if same else "all"
    raise DataError(
        "weights are not placed as their ids", where="row splits, indices or shape, number " + str(at),
        value=(weights[at] if same else weights.shape), allowed=str(ids[at] if same else ids.shape),
        fix="make them of the ids: ids.with_values(weights), or tf.SparseTensor(ids.indices, weights, ids.dense_shape)",
    )  # fmt: skip


def _tensor(given: Any) -> Any:
    try:
        return tensorflow().convert_to_tensor(given)
    except (TypeError, ValueError) as error:
        raise DataError("ids are no tensor", value=str(error)) from error


def _values(given: Any) -> tuple[Any, Any]:
    tf = tensorflow()
    if isinstance(given, tf.RaggedTensor):
        return given.values, tf.cast(given.row_splits, tf.int64)
    if isinstance(given, tf.SparseTensor):
        lengths = tf.math.bincount(
            tf.cast(given.indices[:, 0], tf.int32), minlength=tf.cast(given.dense_shape[0], tf.int32), dtype=tf.int64
        )
        return given.values, tf.concat([tf.zeros((1,), tf.int64), tf.cumsum(lengths)], 0)
    dense = _tensor(given)
    if dense.shape.rank != 2:
        raise DataError("ids have rank 2", value=str(dense.shape), allowed="RaggedTensor, SparseTensor, a matrix")
    shape = tf.shape(dense, out_type=tf.int64)
    return tf.reshape(dense, (-1,)), tf.range(shape[0] + 1) * shape[1]


def _look_up(
    variables: Sequence[Any], tables: Sequence[Table], given: Sequence[_Parts], names: Sequence[str], training: bool
) -> list[Any]:
    tf = tensorflow()
    flat = [part for parts in given for part in parts.tensors]
    recorded = _recorded()
    # Eagerly and outside of a tape nothing can be differentiated; inside of tf.function a caller's tape may come later.
    trains = training and any(one.trainable for one in variables) and (recorded or not tf.executing_eagerly())

    def unpacked(arrays: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        rest = list(arrays)
        out: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for parts in given:
            values, offsets = _as_torch(rest.pop(0)), _as_torch(rest.pop(0))
            weights = None if parts.weights is None else _as_torch(rest.pop(0))
            if parts.structures:
                _check_structures(rest.pop(0), rest.pop(0))
            out.append((values, offsets, weights))
        return out

    @short_traceback
    def read(*arrays: Any) -> list[Any]:
        parts = unpacked(arrays)
        return [t.read(*own, name).float().numpy() for t, own, name in zip(tables, parts, names, strict=True)]

    @short_traceback
    def begin(*arrays: Any) -> list[Any]:
        numbers, rows = [], []
        for table, own, name in zip(tables, unpacked(arrays), names, strict=True):
            number, found = table.begin(*own, name, certain=recorded)
            numbers.append(number)
            rows.append(found.float().numpy())
        return [np.asarray(numbers, np.int64), *rows]

    @short_traceback
    def deliver(numbers: Any, *gradients: Any) -> list[Any]:
        together = zip(tables, numbers, gradients, names, strict=True)
        first = [table.deliver(int(n), _as_torch(np.asarray(g)), name) for table, n, g, name in together]
        return [np.float32(one) for one in first]

    def shaped(rows: Sequence[Any]) -> list[Any]:
        for one, table in zip(rows, tables, strict=True):
            one.set_shape((None, table.config.dim))
        return list(rows)

    if not trains:
        return shaped(_listed(tf.numpy_function(read, flat, [tf.float32] * len(tables))))

    @tf.custom_gradient
    def train(*anchors: Any) -> Any:
        with tf.control_dependencies(anchors):
            numbers, *rows = tf.numpy_function(begin, flat, [tf.int64, *[tf.float32] * len(tables)])

        def backward(*gradients: Any) -> Any:
            # The factor by which a script scales it: 1 for the first gradient of a step, whose rows wait in the table.
            factors = _listed(tf.numpy_function(deliver, [numbers, *gradients], [tf.float32] * len(tables)))
            for one in factors:
                one.set_shape(())
            return factors

        return tuple(shaped(rows)), backward

    return _listed(train(*[tf.convert_to_tensor(one) for one in variables]))


def _recorded() -> bool:
    """Return whether a tape may record what is computed now."""
    from tensorflow.python.eager import record

    return bool(record.could_possibly_record())


def _listed(found: Any) -> list[Any]:
    """Return results as a list: TensorFlow gives a single one as it is, in some modes."""
    return list(found) if isinstance(found, list | tuple) else [found]


@plain_python
def all2all_dense_embedding(param: Any, indices: Any, *, training: bool = True) -> Any:
    """Look up one row for each key: (..., D).

    Args:
        param: a variable.
        indices: keys of any shape, int32 or int64.
        training: as of `lookup_sparse`.
    """
    tf = tensorflow()
    indices = _tensor(indices)
    flat = tf.reshape(indices, (-1, 1))
    rows = lookup_sparse(param, flat, combiners="sum", training=training)
    return tf.reshape(rows, tf.concat([tf.shape(indices), [table_of(param).config.dim]], 0))


def sparse_read_and_evict(var: Any, indices: Any) -> Any:
    """Refuse SOK's lookup that returns the rows that it evicts: a table removes them without a copy.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "evicted rows are not returned", where=f"variable {table_of(var).config.name!r}", value="sparse_read_and_evict",
        fix="look up by lookup_sparse; to keep rows, give the variable no max_capacity, or call incremental_model_dump "
        "between steps",
    )  # fmt: skip
