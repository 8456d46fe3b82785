"""`lookup_sparse`: pool rows of several variables in one call of the host.

Shapes: B rows of the batch, N keys, D numbers a row.
"""

from __future__ import annotations

from typing import Any, Final

from viviane.core.errors import ConfigError, DataError
from viviane.tensorflow.arguments import listed, optional
from viviane.tensorflow.host_calls import Lookup, Parts, check_structures, look_up, plain_python, tensorflow
from viviane.tensorflow.table_variable import has_table, rows_of_keys, table_of

_COMBINERS: Final = ("sum", "mean", "sqrtn")


@plain_python
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool = True,
    hotness: Any = None,
) -> Any:
    """Pool the rows of keys: (B, D), one for each variable.

    Args:
        params: a variable, or a list; a tf.Variable is looked up by TensorFlow.
        sp_ids: for each, a tf.RaggedTensor or tf.SparseTensor of rank 2, int32 or int64; a dense matrix too.
        sp_weights: for each, float32, with the row splits or indices of its ids; a mean is divided by their sum.
            Combiners in this place are taken as such, and hotness is left out: SOK 4.2 and before had those here.
        combiners: for each, "sum", "mean" (default) or "sqrtn"; or one for all.
        use_low_frequency_filter: keys are admitted by the variable's filter_ratio, with either value.
        training: False where no gradient will come.
        hotness: no effect: keys are counted where they come.

    Raises:
        ConfigError, DataError: lists of different lengths, other types, weights that are not one for each key.
            Inside of tf.function TensorFlow raises the last, with the same text.
    """
    del hotness, use_low_frequency_filter
    if _are(sp_weights, str) and combiners is None:
        sp_weights, combiners = None, sp_weights
    elif _are(sp_weights, int) and isinstance(sp_weights, list | tuple):
        sp_weights = None
    single = not isinstance(params, list | tuple)
    variables, ids = ([params], [sp_ids]) if single else (list(params), listed("sp_ids", sp_ids))
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
        if not isinstance(name, str) or name not in _COMBINERS:
            raise ConfigError("no such combiner", value=name, allowed=", ".join(map(repr, _COMBINERS)))
    for one in variables:
        if not _is_tensorflow_variable(one):
            table_of(one)
    found = _found(variables, [_parts(one, own) for one, own in zip(ids, weights, strict=True)], names, training)
    return found[0] if single else found


def _found(variables: list[Any], given: list[Parts], names: list[str], training: bool) -> list[Any]:
    """Look tables up in one call of the host, and TensorFlow's own variables by TensorFlow."""
    lookups = {
        i: Lookup(table_of(one), one.anchor(), one.trainable, parts, name)
        for i, (one, parts, name) in enumerate(zip(variables, given, names, strict=True))
        if has_table(one)
    }
    rows = dict(zip(lookups, look_up(list(lookups.values()), training) if lookups else [], strict=True))
    return [
        rows[i] if i in rows else _of_tensorflow(one, parts, name)
        for i, (one, parts, name) in enumerate(zip(variables, given, names, strict=True))
    ]


def _is_tensorflow_variable(one: Any) -> bool:
    tf = tensorflow()
    return isinstance(one, tf.Variable) and not has_table(one) and one.shape.rank == 2


def _of_tensorflow(variable: Any, parts: Parts, combiner: str) -> Any:
    """Pool rows of a variable of TensorFlow's own: (B, D)."""
    tf = tensorflow()
    count = tf.size(parts.splits) - 1
    places = tf.ragged.row_splits_to_segment_ids(parts.splits)
    weights = tf.ones_like(parts.values, tf.float32) if parts.weights is None else parts.weights
    same = (
        tf.debugging.assert_equal(*parts.structures, "weights are not placed as their ids")
        if parts.structures
        else None
    )
    with tf.control_dependencies([] if same is None else [same]):
        weights = tf.cast(weights, variable.dtype)[:, tf.newaxis]
    total = tf.math.unsorted_segment_sum(tf.gather(variable, parts.values) * weights, places, count)
    if combiner == "sum":
        return total
    square = combiner == "sqrtn"
    sums = tf.math.unsorted_segment_sum(weights * weights if square else weights, places, count)
    return tf.math.divide_no_nan(total, tf.sqrt(sums) if square else sums)


def _are(given: Any, kind: type) -> bool:
    """Return whether an argument is of a type, or a list of such."""
    every = given if isinstance(given, list | tuple) else [given]
    return bool(every) and all(isinstance(one, kind) and not isinstance(one, bool) for one in every)


def _parts(ids: Any, weights: Any) -> Parts:
    tf = tensorflow()
    values, splits = _values(ids)
    if values.dtype not in (tf.int32, tf.int64):
        raise DataError("keys are int32 or int64", value=values.dtype.name)
    if weights is None:
        return Parts(values, splits)
    own = tf.cast(_values(weights)[0], tf.float32)
    return Parts(values, splits, own, _structures(ids, weights))


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
        check_structures(*(one.numpy() for one in pair))
        return ()
    return pair


def _kind_of(given: Any) -> str:
    tf = tensorflow()
    if isinstance(given, tf.RaggedTensor):
        return "RaggedTensor"
    return "SparseTensor" if isinstance(given, tf.SparseTensor) else "matrix"


def _tensor(given: Any) -> Any:
    try:
        return tensorflow().convert_to_tensor(given)
    except (TypeError, ValueError) as error:
        raise DataError("ids are no tensor", value=str(error)) from error


def _values(given: Any) -> tuple[Any, Any]:
    """Return keys or weights of rank 2 one after another, (N,), and their row splits, (B + 1,)."""
    tf = tensorflow()
    is_own = isinstance(given, tf.RaggedTensor | tf.SparseTensor)
    whole = given if is_own else _tensor(given)
    if whole.shape.rank not in (2, None):
        raise DataError("ids have rank 2", value=str(whole.shape), allowed="RaggedTensor, SparseTensor, a matrix",
                        fix="for one row a key use all2all_dense_embedding, or reshape to (-1, 1)")  # fmt: skip
    if isinstance(given, tf.RaggedTensor):
        if given.values.shape.rank != 1:
            raise DataError("rows of ragged ids have one length", value=str(given.shape),
                            fix="pass a matrix, or ids without inner dimensions")  # fmt: skip
        return given.values, tf.cast(given.row_splits, tf.int64)
    if isinstance(given, tf.SparseTensor):
        rows = given.indices[:, 0]
        sorted_rows = tf.debugging.assert_non_negative(
            rows[1:] - rows[:-1], "indices of a SparseTensor are not in order: call tf.sparse.reorder"
        )
        with tf.control_dependencies([] if sorted_rows is None else [sorted_rows]):
            lengths = tf.math.bincount(
                tf.cast(rows, tf.int32), minlength=tf.cast(given.dense_shape[0], tf.int32), dtype=tf.int64
            )
        return given.values, tf.concat([tf.zeros((1,), tf.int64), tf.cumsum(lengths)], 0)
    shape = tf.shape(whole, out_type=tf.int64)
    return tf.reshape(whole, (-1,)), tf.range(shape[0] + 1) * shape[1]


@plain_python
def all2all_dense_embedding(param: Any, indices: Any, *, training: bool = True) -> Any:
    """Look up one row for each key: (..., D).

    Args:
        param: a variable.
        indices: keys of any shape, int32 or int64.
        training: as of `lookup_sparse`.
    """
    table_of(param)
    keys = _tensor(indices)
    if keys.dtype not in (tensorflow().int32, tensorflow().int64):
        raise DataError("keys are int32 or int64", value=keys.dtype.name)
    return rows_of_keys(param, keys, training)


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
