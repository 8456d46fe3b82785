"""The class of SOK's variables: to TensorFlow a number through which gradients pass, to a script the rows of a table.

Shapes: V rows, N keys, D numbers a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch

from viviane.core.errors import ConfigError
from viviane.core.whole_numbers import whole_numbers
from viviane.embedding.external import LostUpdateError
from viviane.tensorflow.arguments import float_rows
from viviane.tensorflow.host_calls import (
    ANOTHER_OPTIMIZER,
    Lookup,
    Parts,
    check_anchor,
    host_call,
    look_up,
    plain_python,
    tensorflow,
)
from viviane.tensorflow.processes import rank, size
from viviane.tensorflow.tables import Table

_KEYS, _ROWS = "keys", "rows"
_NO_ROWS: Final = "keep rows with sok.dump, or read them with sok.export"


def table_of(variable: Any) -> Table:
    """Return a variable's table.

    Raises:
        ConfigError: it is another kind of variable.
    """
    table = getattr(variable, "viviane_table", None)
    if not isinstance(table, Table):
        raise ConfigError(
            "not a variable with a table", value=type(variable).__name__, allowed="sok.Variable, sok.DynamicVariable"
        )
    return table


def has_table(variable: Any) -> bool:
    """Return whether a variable has a table."""
    return isinstance(getattr(variable, "viviane_table", None), Table)


def check_moved(variable: Any) -> None:
    """Raise where an optimizer of TensorFlow's moved the variable itself, if that can be seen now."""
    if tensorflow().executing_eagerly():
        check_anchor(float(variable.anchor()), variable.viviane_table)


def check_alone(table: Table, what: str) -> None:
    """Refuse a call that one process may make alone, where the rows are over several.

    Raises:
        ConfigError: they are.
    """
    if size() > 1:
        raise ConfigError(
            "the rows are over several processes", where=f"variable {table.config.name!r}", value=what,
            fix="call sok.dump in all processes, or sok.export for those of this one",
        )  # fmt: skip


@plain_python
def rows_of_keys(variable: Any, indices: Any, training: bool) -> Any:
    """Look up one row for each key: (..., D)."""
    tf = tensorflow()
    flat = tf.reshape(indices, (-1,))
    parts = Parts(flat, tf.range(tf.size(flat, out_type=tf.int64) + 1))
    own = Lookup(table_of(variable), variable.anchor(), variable.trainable, parts, "sum")
    [rows] = look_up([own], training)
    out = tf.reshape(rows, tf.concat([tf.shape(indices), [own.table.config.dim]], 0))
    out.set_shape([*indices.shape, own.table.config.dim])
    return out


class _TableView:
    """What a variable tells of its table."""

    viviane_table: Table
    key_type: Any = None
    mode: str = "distributed"
    shape: Any
    name: str
    dtype: Any
    trainable: bool

    def anchor(self) -> Any:
        """Return the number: zero."""
        raise NotImplementedError

    def _fail(self, what: str, fix: str) -> ConfigError:
        return ConfigError(what, where=f"variable {self.table_name!r}", fix=fix)

    @property
    def size(self) -> Any:
        """Rows and width at present, as SOK has it."""
        return tensorflow().constant([len(self.viviane_table.rows()[0]), self.dimension])

    @property
    def global_shape(self) -> tuple[int | None, int]:
        """Rows, if they are fixed, and width."""
        return (getattr(self.viviane_table.config, "num_rows", None), self.dimension)

    @property
    def dimension(self) -> int:
        """Numbers of a row."""
        return self.viviane_table.config.dim

    @property
    def table_name(self) -> str:
        """The table's name in files."""
        return self.viviane_table.config.name

    @property
    def target_gpu(self) -> int:
        """The process that has the table, or -1 where all have a part of it."""
        return int(self.mode.partition(":")[2] or -1)

    @property
    def num_gpus(self) -> int:
        """The number of processes, SOK's word for it."""
        return size()

    def key_map(self, indices: Any) -> Any:
        """Return the places of keys in the process that has them."""
        return indices if self.target_gpu >= 0 else indices // size()

    def __repr__(self) -> str:
        kind = "DynamicVariable" if self.viviane_table.is_dynamic else "Variable"
        return f"<sok.{kind} {self.name!r} shape={self.shape} dtype={self.dtype.name}>"


class _Reading(_TableView):
    """Rows for TensorFlow's own operations."""

    def value(self) -> Any:
        """Return all rows of a fixed table, (V, D); no gradient passes."""
        tf = tensorflow()
        if self.viviane_table.is_dynamic:
            raise self._fail("a dynamic table is no tensor", "look keys up, or call sok.export(variable)")

        check_alone(self.viviane_table, "value")

        @tf.custom_gradient
        def rows(anchor: Any) -> Any:
            with tf.control_dependencies([anchor]):
                read = tf.numpy_function(self._rows, [], tf.float32)
            read.set_shape(self.shape)

            def backward(_: Any) -> Any:
                raise self._fail("the rows of a whole table are differentiated: they would not be updated",
                                 "look keys up, all of them where need be")  # fmt: skip

            return tf.cast(read, self.dtype), backward

        return rows(self.anchor())

    def _rows(self) -> np.ndarray[Any, Any]:
        rows: np.ndarray[Any, Any] = self.viviane_table.rows()[1].numpy()
        return rows

    def read_value(self) -> Any:
        """Return the same."""
        return self.value()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return the same as an array."""
        array: np.ndarray[Any, Any] = self.value().numpy()
        return array

    def sparse_read(self, indices: Any, name: Any = None) -> Any:
        """Return the rows of keys, (..., D), for tf.gather and tf.nn.embedding_lookup; with gradients."""
        del name
        keys = tensorflow().convert_to_tensor(indices)
        if size() > 1 and self.target_gpu < 0 and not self.viviane_table.is_dynamic:
            keys = keys * size() + rank()  # SOK numbers the rows of a process
        return rows_of_keys(self, keys, True)

    def gather_nd(self, indices: Any, name: Any = None) -> Any:
        """Return the rows of keys (..., 1)."""
        tf = tensorflow()
        keys = tf.convert_to_tensor(indices)
        if keys.shape[-1] != 1:
            raise self._fail("numbers of rows are not looked up alone", "look rows up, and slice them")
        return self.sparse_read(keys[..., 0], name)


class _Writing(_TableView):
    """Rows from TensorFlow's own operations."""

    def assign(self, value: Any, use_locking: Any = None, name: Any = None, read_value: bool = True) -> Any:
        """Replace all rows of a fixed table, (V, D)."""
        tf = tensorflow()
        del use_locking, name, read_value
        if self.viviane_table.is_dynamic:
            raise self._fail("rows are put under keys", "call sok.assign(variable, keys, rows)")
        count = self.global_shape[0] or 0
        return self._put(tf.range(count, dtype=tf.int64), tf.convert_to_tensor(value), self.viviane_table.put)

    def assign_add(self, *_: Any, **__: Any) -> Any:
        """Refuse what other optimizers do."""
        raise LostUpdateError(
            "another optimizer moves the variable, which moves no row", where=f"variable {self.table_name!r}",
            fix=ANOTHER_OPTIMIZER,
        )  # fmt: skip

    assign_sub = assign_add

    def scatter_update(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Put the rows of a tf.IndexedSlices."""
        return self._put(sparse_delta.indices, sparse_delta.values, self.viviane_table.put)

    def scatter_add(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Add the rows of a tf.IndexedSlices."""
        return self._put(sparse_delta.indices, sparse_delta.values, self.viviane_table.add)

    def scatter_sub(self, sparse_delta: Any, use_locking: bool = False, name: Any = None) -> Any:
        """Subtract the rows of a tf.IndexedSlices."""
        return self._put(sparse_delta.indices, -sparse_delta.values, self.viviane_table.add)

    def _no_scatter(self, *_: Any, **__: Any) -> Any:
        raise self._fail("a table has no such update", "use sok.export and sok.assign")

    scatter_div = scatter_max = scatter_min = scatter_mul = batch_scatter_update = _no_scatter
    scatter_nd_add = scatter_nd_sub = scatter_nd_update = scatter_nd_max = scatter_nd_min = _no_scatter

    def _put(self, indices: Any, values: Any, put: Any) -> Any:
        def write(keys: Any, rows: Any) -> Any:
            own = torch.from_numpy(whole_numbers(keys, np.int64, "indices").ravel().copy())
            put(own, torch.from_numpy(float_rows("values", rows).copy()))
            return np.int64(0)

        tf = tensorflow()
        done = host_call(write, [indices, values], tf.int64)
        with tf.control_dependencies([done]):
            return self


class _Saving(_Writing):
    """TensorFlow's checkpoints and models."""

    def _serialize_to_tensors(self) -> Any:
        tf = tensorflow()
        check_alone(self.viviane_table, "a checkpoint of TensorFlow's")
        check_moved(self)
        keys, rows = self.viviane_table.rows()
        return {_KEYS: tf.constant(keys.numpy()), _ROWS: tf.constant(rows.numpy())}

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return self._put(restored_tensors[_KEYS], restored_tensors[_ROWS], self.viviane_table.put)

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        raise self._fail("a SavedModel has no place for the rows of tables", _NO_ROWS)


@cache
def variable_class() -> Any:
    """Return the class of variables."""
    tf = tensorflow()
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    class TableVariable(_Reading, _Saving, ResourceVariable):
        """A number through which TensorFlow's gradients reach a table; `viviane_table` has the rows."""

        def anchor(self) -> Any:
            """Return the number: zero."""
            return ResourceVariable.value(self)

        @property
        def shape(self) -> Any:
            """The shape of the rows, (V, D); V is None where keys come as they will."""
            made = hasattr(self, "viviane_table")
            return tf.TensorShape(self.global_shape) if made else ResourceVariable.shape.fget(self)

    return TableVariable
