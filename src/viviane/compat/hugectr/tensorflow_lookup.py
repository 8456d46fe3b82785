"""`hierarchical_parameter_server`: TensorFlow layers that look keys up in the tables of a parameter server.

TensorFlow is imported when a layer is first asked for. The lookup is a call of the host, so that a SavedModel with
these layers runs only in the process that made it.

Shapes: B rows of a batch, N keys, D numbers of a vector.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from viviane.compat.hugectr.parameter_server import HPS
from viviane.core.errors import ConfigError, suggest

NAME: Final = "hierarchical_parameter_server"
_LAYERS: Final = ("LookupLayer", "SparseLookupLayer")
_COMBINERS: Final = ("mean", "sum", "sqrtn")
_servers: dict[str, HPS] = {}
"""The servers of this process by the path of their JSON; the first one serves layers that name none."""


class AbsentPackageError(ConfigError, ImportError):
    """A script used a package that is not there; scripts that do not need it catch ImportError."""


class TensorflowLookups(ModuleType):
    """The package; its layers are made when they are first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name not in _LAYERS:
            raise AttributeError(f"{self.__name__} has no {name!r} here; {suggest(name, ['Init', *_LAYERS])}")
        if find_spec("tensorflow") is None:
            raise AbsentPackageError("the layers need TensorFlow", where=f"{self.__name__}.{name}",
                                     fix="pip install 'viviane[tensorflow]', or look keys up with "
                                         "hugectr.inference.HPS")  # fmt: skip
        return _layers()[name]


def package() -> TensorflowLookups:
    """Return the package that `import hierarchical_parameter_server` finds."""
    made = TensorflowLookups(NAME)
    vars(made).update(Init=initialize, __path__=[], __version__="25.03")
    return made


def initialize(*, ps_config_file: str, global_batch_size: int = 1, **more: Any) -> str:
    """Open the parameter server: hps.Init.

    Args:
        ps_config_file: its JSON.
        global_batch_size: without effect, batches may have any size.
        more: must be empty.
    """
    if more:
        raise ConfigError("unknown argument of HugeCTR's call", where="hps.Init", value=next(iter(more)),
                          allowed="ps_config_file, global_batch_size")  # fmt: skip
    _server(ps_config_file)
    return "OK"


def _server(path: str) -> HPS:
    """Return the server of a JSON, "": the first that was opened.

    Raises:
        ConfigError: none has been opened.
    """
    if not path:
        if not _servers:
            raise ConfigError("the parameter server has not been initialised", where=NAME,
                              fix="hps.Init(global_batch_size=..., ps_config_file=...), or both arguments of the layer"
                              )  # fmt: skip
        return next(iter(_servers.values()))
    key = str(Path(path).resolve())
    if key not in _servers:
        _servers[key] = HPS(path)
    return _servers[key]


@contextmanager
def keras_of_scripts(text: str) -> Iterator[None]:
    """Let tf.keras be Keras 2 for a block, for which scripts with these layers are written, if tf_keras is installed.

    TF_USE_LEGACY_KERAS, if it is set, decides instead.
    """
    name = "TF_USE_LEGACY_KERAS"
    if NAME not in text or name in os.environ or find_spec("tf_keras") is None or "tensorflow" in sys.modules:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def close_servers() -> None:
    """Close the servers that layers of a script have opened."""
    while _servers:
        _servers.popitem()[1].close()


@functools.cache
def _layers() -> dict[str, Any]:
    """Return the layers, which are classes of the Keras that TensorFlow has."""
    import tensorflow as tf

    class Lookup(tf.keras.layers.Layer):  # type: ignore[misc]
        def __init__(
            self, model_name: str, table_id: int, emb_vec_size: int, emb_vec_dtype: Any = tf.float32,
            ps_config_file: str = "", global_batch_size: int = 1, **more: Any,
        ) -> None:  # fmt: skip
            super().__init__(**more)
            if tf.as_dtype(emb_vec_dtype) != tf.float32:
                raise ConfigError("vectors are float32", where=f"hps.{type(self).__name__}, emb_vec_dtype",
                                  value=str(emb_vec_dtype), allowed="tf.float32")  # fmt: skip
            self.model_name, self.table_id, self.emb_vec_size = model_name, table_id, emb_vec_size
            self.ps_config_file, self.global_batch_size = ps_config_file, global_batch_size
            self.emb_vec_dtype = tf.float32

        def _vectors(self, keys: Any, max_norm: float | None) -> Any:
            """Return the vectors of keys, one more dimension of D."""
            name, table, width, path = self.model_name, self.table_id, self.emb_vec_size, self.ps_config_file

            def found(values: Any) -> Any:
                vectors = _server(path).lookup(np.asarray(values).reshape(-1), name, table)
                if vectors.shape[1] != width:
                    raise ConfigError("the width of the table differs", where=f"hps, model {name!r}, table {table}",
                                      value=width, allowed=str(vectors.shape[1]))  # fmt: skip
                return vectors.reshape(*np.shape(values), width)

            keys = tf.convert_to_tensor(keys)
            vectors = tf.numpy_function(found, [keys], tf.float32, stateful=True)
            vectors.set_shape(keys.shape.concatenate([width]))
            return vectors if max_norm is None else tf.clip_by_norm(vectors, max_norm, axes=[-1])

        def get_config(self) -> dict[str, Any]:
            own = ("model_name", "table_id", "emb_vec_size", "ps_config_file", "global_batch_size")
            return {**super().get_config(), **{name: getattr(self, name) for name in own}}

    class LookupLayer(Lookup):
        """Vectors of keys: ids (...) to (..., D), as tf.nn.embedding_lookup."""

        def call(self, ids: Any, max_norm: float | None = None) -> Any:
            return self._vectors(ids, max_norm)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, self.emb_vec_size)

    class SparseLookupLayer(Lookup):
        """Pooled vectors of a sparse tensor's keys, (B, ...) to (B, D), as tf.nn.embedding_lookup_sparse."""

        def call(
            self, sp_ids: Any, sp_weights: Any = None, name: str | None = None, combiner: str | None = None,
            max_norm: float | None = None,
        ) -> Any:  # fmt: skip
            del name
            how = combiner or "mean"
            if how not in _COMBINERS:
                raise ConfigError("unknown combiner", where="hps.SparseLookupLayer", value=combiner,
                                  allowed=", ".join(_COMBINERS))  # fmt: skip
            ids, weights = (
                one.to_sparse() if isinstance(one, tf.RaggedTensor) else one for one in (sp_ids, sp_weights)
            )
            rows, count = ids.indices[:, 0], ids.dense_shape[0]
            vectors = self._vectors(ids.values, max_norm)
            factors = tf.ones_like(rows, tf.float32) if weights is None else tf.cast(weights.values, tf.float32)
            pooled = tf.math.unsorted_segment_sum(vectors * factors[:, None], rows, count)
            if how == "sum":
                return pooled
            sums = tf.math.unsorted_segment_sum(factors if how == "mean" else factors**2, rows, count)
            return tf.math.divide_no_nan(pooled, (sums if how == "mean" else tf.sqrt(sums))[:, None])

        def compute_output_shape(self, shape: Any) -> Any:
            return (shape[0], self.emb_vec_size)

    return {"LookupLayer": LookupLayer, "SparseLookupLayer": SparseLookupLayer}
