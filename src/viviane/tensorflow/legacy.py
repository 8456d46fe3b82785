"""The API of SOK 1.x: layers of Keras 2, `OptimizerScope`, `Saver`.

Shapes: B rows of the batch, S slots, L keys of a slot, D numbers a row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from viviane.core.errors import CheckpointError, ConfigError, DataError, expect
from viviane.core.files import write_bytes_atomic
from viviane.tensorflow.arguments import fitting, float_rows, folder_of, listed, number, pairs_of, positive
from viviane.tensorflow.host_calls import plain_python, tensorflow
from viviane.tensorflow.lookup import all2all_dense_embedding, lookup_sparse
from viviane.tensorflow.optimizer import Adam, OptimizerWrapper
from viviane.tensorflow.processes import init, size
from viviane.tensorflow.table_variable import table_of
from viviane.tensorflow.variables import DynamicVariable, Variable, assign, file_name, filter_variables, rows_of

_made: dict[str, Any] = {}
_wrappers: weakref.WeakKeyDictionary[Any, OptimizerWrapper] = weakref.WeakKeyDictionary()


def Init(global_batch_size: int | None = None, seed: int | None = None, **_: Any) -> None:  # noqa: N802 - SOK's name
    """Join the processes of the job.

    Args:
        global_batch_size: of all processes; any batch is taken.
        seed: of initial rows, which `embedding_initializer` has here.
    """
    del global_batch_size, seed
    init()


# Layers --------------------------------------------------------------------------------------------------------------


@cache
def _base() -> Any:
    """Return what both layers share, a layer of Keras 2."""
    keras = tensorflow().keras
    version = getattr(keras, "__version__", "2")  # tf_keras does not tell it here
    if version.startswith("3"):
        raise ConfigError(
            "layers of SOK 1.x are layers of Keras 2", value=f"tf.keras is Keras {version}",
            fix="pip install tf_keras and run the script by `viviane sok`, or set TF_USE_LEGACY_KERAS=1; or use "
            "viviane.keras",
        )  # fmt: skip

    class TableLayer(keras.layers.Layer):  # type: ignore[name-defined]
        def __init__(
            self, max_vocabulary_size_per_gpu: int, embedding_vec_size: int, use_hashtable: bool, key_dtype: Any,
            embedding_initializer: Any, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__(**options)
            _check_key_type(key_dtype)
            self.max_vocabulary_size_per_gpu, self.embedding_vec_size = max_vocabulary_size_per_gpu, embedding_vec_size
            rows = number("max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu, int) * size()
            name = f"{self.name}_embedding_variable"
            if use_hashtable:
                self._variable = DynamicVariable(
                    embedding_vec_size, _law(embedding_initializer, self.name), "hbm", name, most_keys=rows
                )
            else:
                make = tensorflow().keras.initializers.get(embedding_initializer)
                make = make or tensorflow().keras.initializers.RandomUniform(-0.05, 0.05)
                self._variable = Variable(shape=(rows, embedding_vec_size), initializer=make, name=name)

        @property
        def embedding_variable(self) -> Any:
            """The variable behind the layer."""
            return self._variable

    return TableLayer


def _check_key_type(given: Any) -> None:
    name = "int64" if given is None else getattr(given, "name", str(given))
    if name not in ("int32", "int64", "uint32"):
        raise ConfigError("no such type of keys", where="key_dtype", value=name, allowed="int64, int32, uint32")


def _law(given: Any, layer: str) -> str:
    """Return the law of new rows as `DynamicVariable` takes it."""
    if given is None:
        return "random"
    made = tensorflow().keras.initializers.get(given)
    config, kind = made.get_config(), type(made).__name__
    if kind in ("Zeros", "Ones", "Constant"):
        return str({"Zeros": 0.0, "Ones": 1.0}.get(kind, config.get("value")))
    if kind == "RandomUniform":
        return f"uniform:{config['minval']}:{config['maxval']}"
    if kind == "RandomNormal":
        return f"normal:{config['mean']}:{config['stddev']}"
    raise ConfigError(
        "a table that grows draws each row by itself", where=f"layer {layer!r}", value=kind,
        allowed="RandomUniform, RandomNormal, Zeros, Ones, Constant", fix="or pass use_hashtable=False",
    )  # fmt: skip


@cache
def _distributed() -> Any:
    class DistributedEmbedding(_base()):  # type: ignore[misc]
        """Pooled rows of slots: a SparseTensor of B * S rows becomes (B, S, D)."""

        def __init__(
            self, combiner: str, max_vocabulary_size_per_gpu: int, embedding_vec_size: int, slot_num: int, max_nnz: int,
            max_feature_num: int = 1, use_hashtable: bool = True, key_dtype: Any = None,
            embedding_initializer: Any = None, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__(
                max_vocabulary_size_per_gpu, embedding_vec_size, use_hashtable, key_dtype, embedding_initializer,
                **options,
            )  # fmt: skip
            if combiner not in ("sum", "mean"):
                raise ConfigError("no such combiner", value=combiner, allowed="'sum', 'mean'")
            del max_feature_num  # room for keys of a batch, which needs none here
            self.combiner = combiner
            self.slot_num, self.max_nnz = positive("slot_num", slot_num), positive("max_nnz", max_nnz)

        def call(self, inputs: Any, training: bool = True) -> Any:
            rows = lookup_sparse(self._variable, inputs, combiners=self.combiner, training=training)
            _check_multiple("DistributedEmbedding, rows of the SparseTensor", rows.shape[0], self.slot_num)
            return tensorflow().reshape(rows, (-1, self.slot_num, self.embedding_vec_size))

    return DistributedEmbedding


def _check_multiple(where: str, count: int | None, each: int) -> None:
    """Refuse a number of rows that is no multiple of a sample's; None, in a graph, is not known yet."""
    if count is not None and count % each:
        raise DataError("the batch is no whole number of samples", where=where, value=count,
                        allowed=f"a multiple of {each}", fix="correct slot_num, or the shape of the keys")  # fmt: skip


def _whole(keys: Any) -> Any:
    """Return keys of a narrower type of whole numbers as int64.

    Raises:
        DataError: they are of another type, which a cast would round or wrap without a word.
    """
    tf = tensorflow()
    if keys.dtype not in (tf.int8, tf.int16, tf.uint8, tf.uint16, tf.uint32):
        raise DataError(
            "keys are not whole numbers", where="All2AllDenseEmbedding", value=keys.dtype.name,
            allowed="int8, int16, int32, int64, uint8, uint16, uint32",
            fix="read them as int64; tf.cast(keys, tf.int64) where you know that no float was rounded",
        )  # fmt: skip
    return tf.cast(keys, tf.int64)


@cache
def _all_to_all() -> Any:
    class All2AllDenseEmbedding(_base()):  # type: ignore[misc]
        """One row for each key: (B, S, L) becomes (B, S, L, D), and (N,) with dynamic_input (N, D)."""

        def __init__(
            self, max_vocabulary_size_per_gpu: int, embedding_vec_size: int, slot_num: int = 1, nnz_per_slot: int = 1,
            dynamic_input: bool = False, use_hashtable: bool = True, key_dtype: Any = None,
            embedding_initializer: Any = None, **options: Any,
        ) -> None:  # fmt: skip
            super().__init__(
                max_vocabulary_size_per_gpu, embedding_vec_size, use_hashtable, key_dtype, embedding_initializer,
                **options,
            )  # fmt: skip
            self.slot_num, self.nnz_per_slot = positive("slot_num", slot_num), positive("nnz_per_slot", nnz_per_slot)
            self.dynamic_input = dynamic_input

        def call(self, inputs: Any, training: bool = True) -> Any:
            tf = tensorflow()
            keys = inputs if inputs.dtype in (tf.int32, tf.int64) else _whole(inputs)
            if not self.dynamic_input:
                count = keys.shape.num_elements()
                _check_multiple("All2AllDenseEmbedding, keys", count, self.slot_num * self.nnz_per_slot)
                keys = tf.reshape(keys, (-1, self.slot_num, self.nnz_per_slot))
            rows = all2all_dense_embedding(self._variable, keys, training=training)
            rows.set_shape([*keys.shape, self.embedding_vec_size])
            return rows

    return All2AllDenseEmbedding


def DistributedEmbedding(*args: Any, **options: Any) -> Any:  # noqa: N802 - SOK's name
    """Return SOK's layer that pools a SparseTensor of B * S rows to (B, S, D).

    Args:
        args, options: combiner, max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, max_nnz, max_feature_num,
            use_hashtable, key_dtype, embedding_initializer, and those of a layer of Keras 2.
    """
    return _layer(_distributed(), args, options)


def All2AllDenseEmbedding(*args: Any, **options: Any) -> Any:  # noqa: N802 - SOK's name
    """Return SOK's layer that looks up one row for each key.

    Args:
        args, options: max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, nnz_per_slot, dynamic_input,
            use_hashtable, key_dtype, embedding_initializer, and those of a layer of Keras 2.
    """
    return _layer(_all_to_all(), args, options)


def _layer(kind: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Make a layer, or name the argument that is missing, unknown or one too many."""
    fitting(kind.__name__, partial(kind.__init__, None), args, options)
    try:
        return kind(*args, **options)
    except TypeError as error:  # Keras refuses options that no layer has
        raise ConfigError("the arguments do not fit the call", where=kind.__name__, value=str(error)) from error


def get_embedding(name: str, constructor: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the layer of a name; it is made by `constructor(**options)` at the first call."""
    expect("name", name, str)
    if name not in _made:
        if not callable(constructor):
            raise ConfigError("no such embedding", value=name, fix="pass its constructor at the first call")
        _made[name] = constructor(**options)
    return _made[name]


# Optimizers ----------------------------------------------------------------------------------------------------------


@plain_python
def split_embedding_variable_from_others(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the variables with tables, and the others."""
    return filter_variables(variables)


@plain_python
@contextmanager
def OptimizerScope(trainable_variables: Sequence[Any]) -> Iterator[None]:  # noqa: N802 - SOK's name
    """Let `apply_gradients` of any optimizer update tables for a block.

    Args:
        trainable_variables: those with tables.
    """
    for variable in listed("trainable_variables", trainable_variables):
        table_of(variable)
    bases = {_owner(kind) for kind in _optimizer_classes()}
    before = {base: base.apply_gradients for base in bases}
    for base, plain in before.items():
        base.apply_gradients = _routed(plain)
    try:
        yield
    finally:
        for base, plain in before.items():
            base.apply_gradients = plain


def _optimizer_classes() -> list[Any]:
    found = tensorflow().keras.optimizers
    return [found.Optimizer, *([found.legacy.Optimizer] if hasattr(found, "legacy") else [])]


def _owner(kind: Any) -> Any:
    return next(one for one in kind.__mro__ if "apply_gradients" in vars(one))


def _routed(plain: Callable[..., Any]) -> Callable[..., Any]:
    @plain_python
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs = pairs_of(grads_and_vars)
        own, _ = filter_variables([variable for _, variable in pairs])
        if not own:
            return plain(self, pairs, *args, **options)
        chosen = {id(one) for one in own}
        rest = [pair for pair in pairs if id(pair[1]) not in chosen]
        if rest:
            plain(self, rest, *args, **options)
        if self not in _wrappers:
            with tensorflow().init_scope():  # its settings are read, which a graph cannot
                _wrappers[self] = OptimizerWrapper(self)
        return _wrappers[self].apply_gradients([pair for pair in pairs if id(pair[1]) in chosen])

    return apply_gradients


optimizers = SimpleNamespace(Adam=Adam)
"""SOK 1.x's own optimizers."""


class _TensorFlowNamespace(ModuleType):
    """What `sok.tf` is: SOK 1.x's copies of TensorFlow's optimizers."""

    @property
    def keras(self) -> Any:
        """`sok.tf.keras.optimizers.Adam` and `sok.tf.keras.mixed_precision.LossScaleOptimizer`."""
        scaled = tensorflow().keras.mixed_precision
        return SimpleNamespace(
            optimizers=SimpleNamespace(Adam=Adam),
            mixed_precision=SimpleNamespace(LossScaleOptimizer=scaled.LossScaleOptimizer),
        )


tf = _TensorFlowNamespace("sparse_operation_kit.tf")


# Files ---------------------------------------------------------------------------------------------------------------


class Saver:
    """Write and read tables as SOK 1.x did: `<name>_keys.file`, int64, and `<name>_values.file`, float32."""

    def dump_to_file(self, embedding_variable: Any, filepath: str | Path) -> None:
        """Write a variable's keys and rows into a folder."""
        folder, name = folder_of("filepath", filepath), file_name(embedding_variable)
        folder.mkdir(parents=True, exist_ok=True)
        keys, rows = rows_of(embedding_variable)
        write_bytes_atomic(folder / f"{name}_keys.file", keys.numpy().astype("<i8").tobytes())
        write_bytes_atomic(folder / f"{name}_values.file", rows.numpy().astype("<f4").tobytes())

    def restore_from_file(self, embedding_variable: Any, filepath: str | Path) -> None:
        """Read what `dump_to_file` wrote; keys of 4 bytes are taken, too.

        Raises:
            CheckpointError: a file is missing, or sizes do not fit; nothing is changed then.
        """
        folder, name = folder_of("filepath", filepath), file_name(embedding_variable)
        width = table_of(embedding_variable).config.dim
        files = [folder / f"{name}_{part}.file" for part in ("keys", "values")]
        for file in files:
            if not file.is_file():
                raise CheckpointError("no such file", where=str(file), fix="restore under the name of the dump")
        keys, values = (file.read_bytes() for file in files)
        count, rest = divmod(len(values), 4 * width)
        if rest or len(keys) not in (4 * count, 8 * count):
            raise CheckpointError(
                "keys and values do not fit", where=str(folder / name), value=f"{len(keys)} and {len(values)} bytes",
                allowed=f"rows of {4 * width} bytes, and 8 or 4 bytes a key",
            )  # fmt: skip
        kind = "<i8" if len(keys) == 8 * count else "<u4"
        rows = np.frombuffer(values, "<f4").reshape(count, width)
        assign(embedding_variable, np.frombuffer(keys, kind).astype(np.int64), rows)

    def load_embedding_values(self, embedding_variable: Any, tensors: Any) -> None:
        """Put rows under the keys 0, 1, ...

        Args:
            embedding_variable: a variable.
            tensors: (N, D), or a list of such, one below the other.
        """
        parts = tensors if isinstance(tensors, list | tuple) else [tensors]
        arrays = [float_rows("tensors", one) for one in parts]
        if not arrays or any(one.ndim != 2 or one.shape[1:] != arrays[0].shape[1:] for one in arrays):
            raise ConfigError("rows are matrices (N, D)", where="tensors", value=[one.shape for one in arrays])
        rows = np.concatenate(arrays)
        assign(embedding_variable, np.arange(len(rows)), rows)
