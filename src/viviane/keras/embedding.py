"""The layers `Embedding` and `EmbeddingBag`: one table each.

Shapes: V rows of the table, D their width, B rows of the batch, L keys of a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any, Final

import keras
import numpy as np
import torch

from viviane.batch import Batch
from viviane.core.errors import ConfigError
from viviane.embedding import (
    DynamicOptions,
    DynamicTable,
    DynamicTableConfig,
    FeatureConfig,
    TableCollection,
    TableConfig,
)
from viviane.embedding.base import LocalCollection
from viviane.embedding.dynamic_config import AnyTable
from viviane.embedding.external import KeyColumns
from viviane.embedding.whole_keys import array_keys
from viviane.keras.backends import backend_of
from viviane.keras.initializers import get_initializer, is_own, law_of_rows, regularized, save_initializer
from viviane.keras.keys import checked_keys, host_keys, key_type
from viviane.keras.layer import TableLayer
from viviane.keras.optimizers import Rule, for_dynamic, load_optimizer, save_optimizer

_FEATURE: Final = "keys"
_ROWS: Final = ".weight"
_STOCK_ROWS: Final = "0"
"""The name of its rows in a file of weights of `keras.layers.Embedding`."""


class OneTable(TableLayer):
    """What layers of one table share."""

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Any,
        embeddings_regularizer: Any,
        row_dtype: str,
        table_name: str | None,
        out_of_range: str,
        dynamic: DynamicOptions | dict[str, Any] | None,
        key_dtype: str | None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if input_dim is None and dynamic is None:
            dynamic = DynamicOptions()
        if input_dim is not None and dynamic is not None:
            raise ConfigError(
                "a dynamic table has no input_dim: it grows with its keys", where=self.where, value=input_dim,
                fix="pass input_dim=None, or leave dynamic out",
            )  # fmt: skip
        self.input_dim, self.output_dim = input_dim, output_dim
        self.embeddings_initializer = get_initializer(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.row_dtype, self.table_name, self.out_of_range = row_dtype, table_name, out_of_range
        if dynamic is not None and not isinstance(dynamic, DynamicOptions):
            dynamic = DynamicOptions.from_dict(dynamic, where=f"{self.where}, dynamic")
        self.dynamic = dynamic
        self.key_dtype = key_type(key_dtype, self.dynamic is not None, self.where)
        self.rule = self._own_rule(self.rule)
        self._table()  # wrong settings are refused here

    @property
    def _name(self) -> str:
        return self.table_name or self.name

    def _table(self, padding_id: int | None = None) -> AnyTable:
        if self.dynamic is None:
            assert self.input_dim is not None
            init = self.embeddings_initializer if is_own(self.embeddings_initializer) else "zero"
            return TableConfig(
                name=self._name, num_rows=self.input_dim, dim=self.output_dim, dtype=self.row_dtype, init=init,
                out_of_range=self.out_of_range, padding_id=padding_id,
            )  # fmt: skip
        return DynamicTableConfig(
            name=self._name, dim=self.output_dim, dtype=self.row_dtype, padding_id=padding_id,
            init=law_of_rows(self.embeddings_initializer, self.where), **self.dynamic.model_dump(exclude_unset=True),
        )  # fmt: skip

    def _own_rule(self, rule: Rule) -> Rule:
        settings = regularized(rule.settings, self.embeddings_regularizer, self.where)
        return Rule(settings, rule.rate, rule.source)

    def _with_rule(self, tables: Sequence[AnyTable]) -> list[AnyTable]:
        if self.dynamic is None:
            return list(tables)
        rule = for_dynamic(self.rule.settings, self.where)
        return [table.model_copy(update={"optimizer": rule}) for table in tables]

    def _fill(self, collection: TableCollection) -> None:
        if self.dynamic is not None or is_own(self.embeddings_initializer):
            return
        shape = (self.input_dim, self.output_dim)
        rows = keras.ops.convert_to_numpy(self.embeddings_initializer(shape, dtype="float32"))
        collection.copy_rows(self._name, torch.from_numpy(np.array(rows)))

    def keys_of_arrays(self, inputs: Any) -> Any:
        """Return keys of an array as a tensor of Keras' backend."""
        return host_keys(inputs, self.key_dtype, self.where)

    def key_batch(self, keys: Sequence[Any]) -> Batch:
        """Return what to look up for the layer's input."""
        if len(keys) != 1:
            raise ConfigError("bags with weights have no fast form", where=self.where, fix="use model.fit")
        plain = array_keys(keys[0], self.where)
        return self.columns.batch(plain.reshape(-1, self.columns.num_columns).to(self.collection.device))

    def step_input(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return looked-up vectors in the shape of the layer's output."""
        own = super().step_input(flat, shape)
        return own.view(*shape, self.output_dim) if self.columns.one_hot else own

    @property
    def embeddings(self) -> Any:
        """The rows (V, D) at present as a tensor of Keras' backend, to look at; of a dynamic table see `collection`.

        Raises:
            ConfigError: a model computes with them, whose steps would neither move them nor see them move.
        """
        if backend_of().is_traced(self.anchor):
            raise ConfigError(
                "a model computes with the rows of a table, which no gradient reaches this way", where=self.where,
                value="layer.embeddings", fix="look keys up: layer(keys), with all keys for all rows",
            )  # fmt: skip
        rows = self.collection.export_table(self._name, copy=False).weight
        return rows if keras.backend.backend() == "torch" else keras.ops.convert_to_tensor(rows.float().cpu().numpy())

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """Return the rows (V, D), as `keras.layers.Embedding` does; of a dynamic table its N keys (N,) and rows (N, D).

        `model.get_weights()`, which callbacks use, brings the whole content of dynamic tables.
        """
        if self.dynamic is not None:
            content = self._dynamic_table().export()
            return [content.keys.cpu().numpy(), content.weight.float().cpu().numpy()]
        return [self.collection.export_table(self._name).weight.float().cpu().numpy()]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Replace the rows (V, D); the optimizer's state stays.

        Of a dynamic table: keys (N,) and rows (N, D), which are its whole content then; the state of keys that it had
        stays.
        """
        if self.dynamic is not None:
            self._replace_content(*weights)
            return
        (rows,) = weights
        given = _given_rows(rows, self.where)
        if tuple(given.shape) != (self.input_dim, self.output_dim):
            raise ConfigError(
                "the shape differs", where=self.where, value=tuple(given.shape),
                allowed=str((self.input_dim, self.output_dim)),
            )  # fmt: skip
        self.collection.copy_rows(self._name, given)

    def _dynamic_table(self) -> DynamicTable:
        if not isinstance(self.collection, LocalCollection):
            raise ConfigError(
                "the keys of the table are spread over several processes", where=self.where, value=self._name,
                fix="use viviane.keras.save_tables and load_tables",
            )  # fmt: skip
        return self.collection.dynamic_table(self._name)

    def _replace_content(self, keys: Any, rows: Any) -> None:
        table, given = self._dynamic_table(), _given_rows(rows, self.where)
        new = array_keys(_array("keys", keys, self.where), self.where).to(torch.int64)
        if new.dim() != 1 or tuple(given.shape) != (len(new), self.output_dim):
            raise ConfigError(
                "keys and rows differ in their shapes", where=self.where, value=(tuple(new.shape), tuple(given.shape)),
                allowed=f"(N,) and (N, {self.output_dim})",
            )  # fmt: skip
        if len(torch.unique(new)) < len(new):
            raise ConfigError("a key is there twice", where=self.where, fix="pass each key once")
        most = table.table.max_capacity
        if most is not None and len(new) > most:
            raise ConfigError("more keys than the table may hold", where=self.where, value=len(new), allowed=str(most),
                              fix="raise max_capacity in dynamic=")  # fmt: skip
        own = table.export().keys
        table.erase(own[~torch.isin(own, new.to(own.device))])
        table.insert_or_assign(new.to(own.device), given.to(own.device))

    def load_own_variables(self, store: Any) -> None:
        """Read what `save_own_variables` wrote, or the rows of a `keras.layers.Embedding` alone.

        Raises:
            CheckpointError: the file holds another table, or another optimizer's state.
        """
        if set(store.keys()) == {_STOCK_ROWS} and self.dynamic is None:
            self.set_weights([np.asarray(store[_STOCK_ROWS])])
        else:
            super().load_own_variables(store)

    def _names_in(self, given: Collection[str]) -> dict[str, str]:
        # The table's name is by default that of the layer, which Keras counts up with each layer of a process.
        tables = [name.removesuffix(_ROWS) for name in given if name.endswith(_ROWS)]
        if len(tables) != 1:
            return super()._names_in(given)
        own, [other] = f"{self._name}.", tables
        found = {name: f"{other}.{name.removeprefix(own)}" for name in self._state()}
        return {name: place for name, place in found.items() if place in given}

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": save_initializer(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "optimizer": save_optimizer(self.held.optimizer),
            "row_dtype": self.row_dtype,
            "table_name": self.table_name,
            "out_of_range": self.out_of_range,
            "dynamic": None if self.dynamic is None else self.dynamic.model_dump(mode="json", exclude_unset=True),
            "key_dtype": self.key_dtype,
            "seed": self.seed,
            "plan": self.plan,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OneTable:
        """Build a layer from `get_config`."""
        if "optimizer" not in config:
            raise ConfigError("the settings of a layer lack a key", value="optimizer")
        return cls(**{**config, "optimizer": load_optimizer(config["optimizer"])})


def _array(what: str, value: Any, where: str) -> np.ndarray[Any, Any]:
    """Return an array, or refuse lists of different lengths by name."""
    try:
        return np.array(value)
    except ValueError as error:
        raise ConfigError(f"{what} are no array", where=where, value=str(error)[:200]) from error


def _given_rows(rows: Any, where: str) -> torch.Tensor:
    """Return rows as a tensor.

    Raises:
        ConfigError: they are no rectangle of real numbers.
    """
    found = _array("rows", rows, where)
    if found.dtype.kind not in "fiub":  # such as bfloat16
        try:
            found = found.astype(np.float32, casting="same_kind" if found.dtype.kind == "c" else "unsafe")
        except (TypeError, ValueError) as error:
            raise ConfigError("rows must be real numbers", where=where, value=str(error)[:200]) from error
    return torch.from_numpy(found)


def _without_stock_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's options without those of `keras.layers.Embedding` that have no meaning here."""
    own = dict(options)
    if own.pop("input_length", None) is not None:
        warnings.warn("input_length has no effect: Keras 3 takes it from the inputs. Leave it out", stacklevel=3)
    for name in ("lora_rank", "lora_alpha", "quantization_config"):
        if own.pop(name, None) is not None:
            raise ConfigError(
                "rows of tables have no such option", where="vk.Embedding", value=name,
                fix="leave it out; rows of 16 bits are row_dtype='bfloat16', an exported model may have rows of 8 bits",
            )  # fmt: skip
    return own


@keras.saving.register_keras_serializable(package="viviane")
class Embedding(OneTable):
    """`keras.layers.Embedding` with Viviane's table: only the rows of a batch are touched in a step.

    The rows are no Keras variable. Backward updates them, by `optimizer`; `anchor`, a trainable zero, is how autograd
    reaches the layer.

    Args:
        input_dim: V, or None for a dynamic table, which takes any whole number as key.
        output_dim: D.
        embeddings_initializer: Keras', or Viviane's such as `UniformInit`, which needs no second copy of the table.
        embeddings_regularizer: L2; its gradient is added for the rows that move. The loss does not contain it.
        embeddings_constraint: None.
        mask_zero: as in Keras: key 0 is masked for the layers that follow.
        weights: initial rows (V, D), or a list of them alone.
        optimizer: a Keras optimizer or its name (SGD, Adagrad, RMSprop, Adam, AdamW, Adamax, Adadelta, Ftrl, with
            Keras' arithmetic: momentum and Adam, for example, move every row in each step), or Viviane's settings such
            as `viviane.Adam(lr=1e-3)`, which moves touched rows. Pass the object that goes to `compile`: callbacks that
            set its rate set the table's. None: see `follow_optimizer`.
        row_dtype: of the rows: "float32", "float16", "bfloat16"; 16-bit rows are rounded stochastically.
        table_name: of the table in checkpoints and exports; None takes the layer's name.
        out_of_range: what a key outside of 0 <= key < V does: "raise", "hash", "default", "ignore"; see TableConfig.
        dynamic: options of a dynamic table: capacity, admission, eviction.
        key_dtype: "int32" or "int64"; None: int64 for dynamic tables, else int32.
        seed: of Viviane's initializers and of rounding.
        plan: of tables over several processes: kinds by table, or a whole plan; None chooses.

    Input shape: (B,) or (B, ..., L), whole numbers. Output shape: the input's and D.

    Example:
        >>> layer = Embedding(1000, 4, optimizer=keras.optimizers.SGD(0.1), embeddings_initializer="ones")
        >>> tuple(layer(np.array([[3, 999]])).shape)
        (1, 2, 4)
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        *,
        optimizer: Any = None,
        row_dtype: str = "float32",
        table_name: str | None = None,
        out_of_range: str = "raise",
        dynamic: DynamicOptions | dict[str, Any] | None = None,
        key_dtype: str | None = None,
        seed: int = 0,
        plan: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            input_dim, output_dim, embeddings_initializer, embeddings_regularizer, row_dtype, table_name, out_of_range,
            dynamic, key_dtype, optimizer=optimizer, seed=seed, plan=plan, **_without_stock_options(options),
        )  # fmt: skip
        if embeddings_constraint is not None:
            raise ConfigError("rows have no constraints", where=self.where, fix="use a regularizer, or clip_row_norm")
        self.mask_zero = self.supports_masking = mask_zero
        self.autocast = False
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list | tuple) else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Make the layer's weights."""
        if not self.built:
            feature = FeatureConfig(name=_FEATURE, table=self._name)
            self._prepare([self._table()], [feature], KeyColumns({_FEATURE: None}))
            self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Look the keys up: (..., D)."""
        keys = checked_keys(inputs, self.key_dtype, self.where)
        shape = keras.ops.shape(keys)
        flat = self.look_up(keras.ops.reshape(keys, (-1, 1)), None, training)
        return keras.ops.reshape(flat, (*shape, self.output_dim))

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return which keys are not 0, with `mask_zero`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Return the input's shape and D."""
        return (*input_shape, self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data."""
        return {**super().get_config(), "mask_zero": self.mask_zero}


@keras.saving.register_keras_serializable(package="viviane")
class EmbeddingBag(OneTable):
    """A table that pools the keys of each row of the batch, as `keras_rs.layers.EmbedReduce`.

    Args:
        input_dim, output_dim, embeddings_initializer, embeddings_regularizer, optimizer, row_dtype, table_name,
            out_of_range, dynamic, key_dtype, seed, plan: as of `Embedding`.
        combiner: "mean" (divided by the sum of weights), "sum", "sqrtn" (divided by the root of their sum of squares).
        padding_key: a key that is skipped in its bag. None: every key counts.

    Input shape: (B, L), and weights (B, L) as second input, if any. Output shape: (B, D).

    Example:
        >>> layer = EmbeddingBag(10, 2, combiner="sum", padding_key=0, embeddings_initializer="ones")
        >>> keras.ops.convert_to_numpy(layer(np.array([[3, 3, 0], [0, 0, 0]]))).tolist()
        [[2.0, 2.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        *,
        combiner: str = "mean",
        padding_key: int | None = None,
        optimizer: Any = None,
        row_dtype: str = "float32",
        table_name: str | None = None,
        out_of_range: str = "raise",
        dynamic: DynamicOptions | dict[str, Any] | None = None,
        key_dtype: str | None = None,
        seed: int = 0,
        plan: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            input_dim, output_dim, embeddings_initializer, embeddings_regularizer, row_dtype, table_name, out_of_range,
            dynamic, key_dtype, optimizer=optimizer, seed=seed, plan=plan, **options,
        )  # fmt: skip
        if combiner not in ("mean", "sum", "sqrtn"):
            raise ConfigError("no such combiner", where=self.where, value=combiner, allowed="'mean', 'sum', 'sqrtn'")
        self.combiner, self.padding_key = combiner, padding_key
        self.autocast = False

    def build(self, inputs_shape: Any = None, weights_shape: Any = None) -> None:
        """Make the layer's weights.

        Raises:
            ConfigError: the number of keys of a row is not known.
        """
        if self.built:
            return
        length = None if inputs_shape is None else inputs_shape[-1]
        if length is None or len(inputs_shape) != 2:
            raise ConfigError(
                "inputs are (B, L) with L known", where=self.where, value=str(inputs_shape),
                fix="pad rows to one length, and name the key that pads them: padding_key=0",
            )  # fmt: skip
        feature = FeatureConfig(
            name=_FEATURE, table=self._name, combiner="mean" if self.combiner == "mean" else "sum"
        )  # fmt: skip
        columns = KeyColumns(
            {_FEATURE: length},
            {} if self.padding_key is None else {_FEATURE: self.padding_key},
            [_FEATURE] if self.combiner == "sqrtn" else [],
        )
        self._prepare([self._table()], [feature], columns)
        self.built = True

    def call(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """Pool the vectors of each row's keys: (B, D)."""
        keys = checked_keys(inputs, self.key_dtype, self.where)
        return self.look_up(keys, None if weights is None else keras.ops.cast(weights, "float32"), training)

    def compute_output_shape(self, inputs_shape: Any, weights_shape: Any = None) -> Any:
        """Return (B, D)."""
        return (inputs_shape[0], self.output_dim)

    def get_config(self) -> dict[str, Any]:
        """Return the layer's settings as plain data."""
        return {**super().get_config(), "combiner": self.combiner, "padding_key": self.padding_key}
