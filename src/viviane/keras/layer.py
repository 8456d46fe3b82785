"""What all layers share: the tables, the learning rate, saving.

Shapes: B rows of the batch, K keys of a row, W columns of the output.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import keras
import numpy as np
import torch
from torch import Tensor

from viviane.batch import Batch
from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import FeatureConfig, TableCollection
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.external import ExternalLookups, KeyColumns
from viviane.embedding.whole_keys import array_keys
from viviane.keras.backends import backend_of, table_device
from viviane.keras.optimizers import Rule, rule_of
from viviane.keras.weights import keep_against_arrays, keep_rows, plain_assign, rows_alone
from viviane.parallel.automatic import make_tables
from viviane.parallel.start import join_processes

_TYPES: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Held:
    """What a layer was given as optimizer: as an attribute of its own Keras would save it in the model's place."""

    optimizer: Any


class TableLayer(keras.layers.Layer):
    """A layer whose rows are in Viviane's tables, and are updated in backward.

    Its only trainable weight is `anchor`, a zero through which the framework's autograd reaches the layer.
    """

    built: bool

    def __init__(self, optimizer: Any, seed: int, plan: Any, **options: Any) -> None:
        super().__init__(**options)
        if keras.backend.backend() == "tensorflow":
            self.supports_jit = False  # XLA compiles no host calls of TensorFlow
        if self.compute_dtype not in _TYPES:
            raise ConfigError(
                "no type of looked-up vectors", where=self.where, value=self.compute_dtype, allowed=", ".join(_TYPES)
            )
        self.held = Held(optimizer)
        self.seed = seed
        self.plan = plan
        self.rule: Rule = rule_of(optimizer, self.where)
        self._scales = keras.config.dtype_policy().compute_dtype == "float16" or self.compute_dtype == "float16"
        self._lookups: ExternalLookups | None = None
        self._step_type = torch.float32
        """Of vectors in the fast form's step; kept, since Keras derives it from a policy each time."""
        self._columns: KeyColumns | None = None
        self._settings: tuple[Any, ...] = ()

    @property
    def where(self) -> str:
        """The layer's name, for errors."""
        return f"layer {self.name!r}"

    def __call__(self, inputs: Any, *args: Any, **options: Any) -> Any:
        """Call the layer; arrays are checked before Keras makes tensors of them, in which JAX cuts 64 bits to 32."""
        return super().__call__(self.keys_of_arrays(inputs), *args, **options)

    def keys_of_arrays(self, inputs: Any) -> Any:
        """Return inputs with keys of arrays as tensors of Keras' backend; other inputs as they are."""
        raise NotImplementedError

    # Tables -------------------------------------------------------------------------------------------------

    def _prepare(self, tables: Sequence[AnyTable], features: Sequence[FeatureConfig], columns: KeyColumns) -> None:
        """Make the weights through which Keras sees the layer; the tables are made when they are used first."""
        self._settings, self._columns = (tuple(tables), tuple(features)), columns
        self.anchor = self.add_weight(name="anchor", shape=(), initializer="zeros", dtype="float32", autocast=False)
        start = 0.0 if callable(self.rule.rate) or self.rule.rate is None else float(self.rule.rate)
        self.learning_rate = self.add_weight(
            name="learning_rate", shape=(), initializer=keras.initializers.Constant(start), dtype="float32",
            trainable=False, autocast=False,
        )  # fmt: skip
        self.iterations = self.add_weight(
            name="iterations", shape=(), initializer="zeros", dtype="int32", trainable=False
        )
        if self.rule.source is not None and not callable(self.rule.rate):
            _watch_rate(self.rule.source, self.learning_rate)
        for variable in (self.learning_rate, self.iterations):
            keep_against_arrays(variable, lambda: self.rule.source is not None)
        keep_rows(self.anchor, self.where, self._rows, self._restore_rows)

    def _fill(self, collection: TableCollection) -> None:
        """Put initial rows into new tables, where Keras draws them."""

    def _own_rule(self, rule: Rule) -> Rule:
        """Return an optimizer's rule with what the layer adds to it."""
        return rule

    def _with_rule(self, tables: Sequence[AnyTable]) -> list[AnyTable]:
        """Return the tables' settings as the layer's optimizer wants them."""
        return list(tables)

    @property
    def lookups(self) -> ExternalLookups:
        """The tables' lookups and updates."""
        if self._lookups is None:
            if not self._settings:
                raise ConfigError("the layer has no tables before it is built", where=self.where, fix="call build()")
            tables, features = self._settings
            device = table_device(self.anchor)
            with backend_of().eagerly(device):
                collection = make_tables(
                    self._with_rule(tables), features, self.rule.settings, device=device, seed=self.seed,
                    group=join_processes("cpu"), plan="auto" if self.plan is None else self.plan, name=self.name,
                )  # fmt: skip
                self._fill(collection)
            self._lookups = ExternalLookups(collection, self.where, self._columns)
            self._step_type = getattr(torch, self.compute_dtype)
        return self._lookups

    @property
    def columns(self) -> KeyColumns:
        """Which columns of the key matrix are whose."""
        assert self._columns is not None
        return self._columns

    @property
    def tables(self) -> tuple[AnyTable, ...]:
        """Settings of the layer's tables; none before it is built."""
        return self._settings[0] if self._settings else ()

    @property
    def width(self) -> int:
        """Columns of the output, W: from the settings, since Keras traces models before their tables can be made."""
        tables, features = self._settings
        dims = {table.name: table.dim for table in tables}
        return sum(dims[feature.table] for feature in features)

    @property
    def collection(self) -> TableCollection:
        """The tables as Viviane has them: to export rows, read dynamic tables, write checkpoints."""
        return self.lookups.collection

    @property
    def num_updates(self) -> int:
        """Steps of the tables so far."""
        return self.lookups.num_updates

    def count_params(self) -> int:
        """Return the numbers of all rows, and the layer's own three."""
        own = int(super().count_params())
        total: int = own + sum(getattr(table, "num_rows", 0) * table.dim for table in self.tables)
        return total

    # Lookup -------------------------------------------------------------------------------------------------

    def look_up(self, keys: Any, weights: Any = None, training: Any = None) -> Any:
        """Look up a matrix of keys (B, K), with weights (B, K) or None: (B, W) in the layer's compute type."""
        trains = bool(training) and self.trainable
        rate = self.next_rate() if trains else self.learning_rate.value
        flat, token = backend_of().look_up(self, keys, weights, rate, trains)
        if trains and self._scales:
            # Its value is 0 and its gradient the loss scale, by which the rows' gradients are divided.
            self.add_loss(token)
        return flat

    def forget_losses(self) -> None:
        """Drop what the last call added to the model's loss, which Keras keeps until the layer is called again."""
        self._clear_losses()

    def next_rate(self) -> Any:
        """Return the learning rate of the step at hand; of a schedule each call is a step."""
        if not callable(self.rule.rate):
            if self.rule.rate is None:
                raise ConfigError(
                    "the layer has no optimizer", where=self.where,
                    fix="pass optimizer=..., the same as to compile(), or call viviane.keras.follow_optimizer(model) "
                    "after compile()",
                )  # fmt: skip
            return self.learning_rate.value
        rate = keras.ops.cast(self.rule.rate(self.iterations.value), "float32")
        self.iterations.assign_add(1)
        return rate

    # The fast form, see viviane.keras.fit: arrays in and out, outside of compiled code.

    def key_batch(self, keys: Sequence[Any]) -> Batch:
        """Return what to look up for the layer's inputs, one array each in the order of `keras.tree.flatten`."""
        raise NotImplementedError

    def matrix_batch(self, keys: Any) -> Batch:
        """Return what to look up for a matrix of keys of int32 or int64, (B, K), in the order of `columns`."""
        return self.columns.batch(array_keys(keys, self.where).to(self.collection.device))

    def input_order(self) -> Sequence[int] | None:
        """Return which of the layer's inputs each part of the key matrix is; None where it is not made of them."""
        return None

    def output_order(self) -> Sequence[int] | None:
        """Return which of the layer's outputs each part of the lookup is; None where they are not its columns."""
        return None

    def step_input(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return looked-up vectors (B, W) as the compiled step takes them.

        Args:
            flat: the vectors.
            shape: of the layer's first input.
        """
        return flat if flat.dtype is self._step_type else flat.to(self._step_type)

    def outputs_of(self, flat: Any) -> list[Any]:
        """Return the layer's outputs, in the order of `keras.tree.flatten`, given what `step_input` gave.

        This is called inside of the step, with a tensor of the backend.
        """
        return [flat]

    def follow(self, optimizer: Any) -> None:
        """Take the rate from an optimizer, now and whenever a callback sets it; arithmetic that is given stays.

        Raises:
            ConfigError: the optimizer has other arithmetic.
        """
        rule = rule_of(optimizer, self.where)
        if self.rule.rate is None and self.held.optimizer is None:
            if self._lookups is not None:
                raise ConfigError(
                    "the layer has been used without an optimizer", where=self.where,
                    fix="call follow_optimizer(model) right after compile(), or pass optimizer=... to the layer",
                )  # fmt: skip
            self.rule, self.held = self._own_rule(rule), Held(optimizer)
        elif self.rule.rate is None:  # Viviane's settings without a rate: their arithmetic, with this optimizer's rate
            pass
        elif callable(rule.rate) != callable(self.rule.rate):
            raise ConfigError("a rate cannot replace a schedule, or a schedule a rate", where=self.where)
        self.rule = Rule(self.rule.settings, rule.rate, rule.source)
        if not callable(rule.rate) and self.built:
            self.learning_rate.assign(rule.rate)
            _watch_rate(rule.source, self.learning_rate)

    # Saving -------------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data.

        Raises:
            ConfigError: Keras writes its old format, which has variables alone, and rows are none.
        """
        if _writes_hdf5():
            raise ConfigError(
                "a file of HDF5 has no place for the tables' rows", where=self.where, value=".h5",
                fix="save the model under a name that ends with .keras, or save_weights with .weights.h5",
            )  # fmt: skip
        return super().get_config()  # type: ignore[no-any-return]

    def save_own_variables(self, store: Any) -> None:
        """Write rows, optimizer state and the layer's weights, as Keras' `save` asks."""
        self.lookups.check()
        for name, value in self._entries().items():
            store[name] = value
        for variable in (self.anchor, self.learning_rate, self.iterations):
            store[f"own.{variable.name}"] = keras.ops.convert_to_numpy(variable)

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote.

        Raises:
            CheckpointError: the file holds other tables, or another optimizer's state.
        """
        names, state = set(store.keys()), self._state()
        written = self._names_in({_plain(name) for name in names if name.startswith(_TABLE)})
        given = {}
        for name, tensor in state.items():
            place = _stored(written.get(name, name))
            given[name] = _to_tensor(self._given(store, place, name, _stored_type(tensor.dtype)), tensor.dtype)
        try:
            self.collection.load_state_dict(given)
        except RuntimeError as error:
            raise CheckpointError("the file does not fit the tables", where=self.where, value=str(error)) from error
        for variable in (self.anchor, self.learning_rate, self.iterations):
            plain_assign(variable, self._given(store, f"own.{variable.name}", variable.name))

    def _given(self, store: Any, place: str, name: str, kind: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
        """Return an array of the file; conversions to its type could change numbers without a word."""
        try:
            array = np.asarray(store[place])
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
            raise CheckpointError("the file lacks a part of a table", where=self.where, value=name) from error
        if array.dtype.kind not in "fiu" or (kind is not None and array.dtype != kind):
            raise CheckpointError("a part of a table has another type", where=f"{self.where}, {name}",
                                  value=str(array.dtype), allowed=str(kind or "a number"))  # fmt: skip
        return array

    def _rows(self) -> dict[str, Tensor]:
        self.lookups.check()
        return {name: rows.clone() for name, rows in rows_alone(self._state()).items()}

    def _restore_rows(self, rows: Mapping[str, Tensor]) -> None:
        state = rows_alone(self._state())
        written = self._names_in(rows)
        if len(written) == len(rows) == len(state):
            rows = {name: rows[written[name]] for name in state}
        if rows.keys() != state.keys():
            raise CheckpointError(
                "the rows are of other tables", where=self.where, value=", ".join(rows), allowed=", ".join(state)
            )
        self.lookups.discard()
        try:
            self.collection.load_state_dict(dict(rows), strict=False)
        except RuntimeError as error:
            raise CheckpointError("the rows do not fit the tables", where=self.where, value=str(error)) from error

    def _names_in(self, given: Collection[str]) -> dict[str, str]:
        """Return the names that parts of the tables have among those of another layer, by their own names."""
        return {name: name for name in self._state() if name in given}

    def _state(self) -> Mapping[str, Tensor]:
        return self.collection.state_dict()

    def _entries(self) -> dict[str, np.ndarray[Any, Any]]:
        return {_stored(name): _to_numpy(tensor) for name, tensor in self._state().items()}


def _writes_hdf5() -> bool:
    try:
        from keras.src.backend.common.global_state import get_global_attribute
    except ImportError:  # another version of Keras: loading such a file raises, too
        return False
    return bool(get_global_attribute("use_legacy_config"))


_TABLE: Final = "table."


def _stored(name: str) -> str:
    return _TABLE + name.replace("/", "|")  # a slash would open a group of the file


def _plain(stored: str) -> str:
    return stored.removeprefix(_TABLE).replace("|", "/")


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu().contiguous()
    return plain.view(torch.int16).numpy() if plain.dtype == torch.bfloat16 else plain.numpy()  # NumPy has none


def _stored_type(dtype: torch.dtype) -> np.dtype[Any]:
    found: np.dtype[Any] = _to_numpy(torch.empty(0, dtype=dtype)).dtype
    return found


def _to_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    whole = torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)
    return whole.view(torch.bfloat16) if dtype == torch.bfloat16 else whole


def _watch_rate(optimizer: Any, variable: Any) -> None:
    """Set `variable` whenever the optimizer's rate is set, as callbacks do."""
    rate = optimizer._learning_rate
    watchers = getattr(rate, "viviane_watchers", None)
    if watchers is None:
        watchers = rate.viviane_watchers = []
        rate.assign = partial(_assign_all, type(rate).assign, rate)
    watchers.append(weakref.ref(variable))


def _assign_all(assign: Any, rate: Any, value: Any, **options: Any) -> Any:
    result = assign(rate, value, **options)
    for watcher in rate.viviane_watchers:
        variable = watcher()
        if variable is not None:
            # A copy: JAX donates both variables' memory to the compiled step, and refuses to take one buffer twice.
            variable.assign(keras.ops.convert_to_tensor(np.array(keras.ops.convert_to_numpy(value))))
    return result


def table_layers(model: Any) -> list[TableLayer]:
    """Return the layers of a model that have Viviane's tables, each once."""
    return list(dict.fromkeys(_layers(model)))


def _layers(layer: Any) -> Iterator[TableLayer]:
    if isinstance(layer, TableLayer):
        yield layer
    for inner in layer._flatten_layers(include_self=False, recursive=True):
        if isinstance(inner, TableLayer):
            yield inner


def follow_optimizer(model: Any) -> None:
    """Let all table layers of a compiled model follow its optimizer's learning rate.

    Layers that were given the model's optimizer follow it already, after `load_model` too. This is for layers without
    an optimizer, for those that were given another object with the same arithmetic, and for those with Viviane's
    settings without a rate, such as `viviane.Adam(weight_decay=1e-4)`, after `load_model` again.
    """
    for layer in table_layers(model):
        layer.follow(model.optimizer)
