"""Variables of TensorFlow whose rows are in Viviane's tables.

Shapes: N keys, D numbers a row.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, wraps
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import torch

from viviane.core.errors import ConfigError, expect
from viviane.core.logging import get_logger
from viviane.core.optional import require
from viviane.core.whole_numbers import whole_numbers
from viviane.embedding import (
    ConstantInit,
    DynamicTableConfig,
    NormalInit,
    ProbabilityAdmission,
    TableConfig,
    UniformInit,
)
from viviane.tensorflow.arguments import fitting, float_rows, listed, number, optional, type_name
from viviane.tensorflow.processes import size
from viviane.tensorflow.tables import Table

_log = get_logger("tensorflow")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_static, _dynamic = itertools.count(), itertools.count()
_MEMORY_OPTIONS: Final = (
    "max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "device_id", "io_by_cpu",
)  # fmt: skip
_ROWS: Final = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def tensorflow() -> Any:
    """Import TensorFlow, or name the extra that installs it."""
    return require("tensorflow", extra="tensorflow", purpose="viviane.tensorflow")


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

    call.autograph_info__ = {}  # type: ignore[attr-defined]  # AutoGraph does not convert functions with this attribute
    return call


@cache
def _variable_class() -> Any:
    """Return the class of variables: an ordinary one, one number large, with a reference to its table."""
    tensorflow()
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    class TableVariable(ResourceVariable):
        """A number through which TensorFlow's gradients reach a table; `table` has the rows."""

        viviane_table: Table

        @property
        def size(self) -> Any:
            """Rows and width at present, as SOK has it."""
            return tensorflow().constant([len(export(self)[0]), self.viviane_table.config.dim])

        @property
        def global_shape(self) -> tuple[int | None, int]:
            """Rows, if they are fixed, and width."""
            config = self.viviane_table.config
            return (getattr(config, "num_rows", None), config.dim)

        @property
        def table_name(self) -> str:
            """The table's name in files."""
            return self.viviane_table.config.name

    return TableVariable


def _wrap(table: Table, trainable: bool) -> Any:
    tf = tensorflow()
    with tf.init_scope():
        variable = _variable_class()(
            initial_value=np.float32(0.0), trainable=trainable, name=table.config.name, dtype=tf.float32
        )
    variable.viviane_table = table
    return variable


def _kind(mode: str | None) -> str:
    optional("mode", mode, str)
    if mode in (None, "distributed"):
        return "row"
    if isinstance(mode, str) and mode.startswith("localized:") and mode[10:].isdigit():
        if int(mode[10:]) >= size():
            raise ConfigError("no such process", where="mode", value=mode, allowed=f"localized:0 to {size() - 1}")
        return "table"
    raise ConfigError("no such mode", value=mode, allowed="'distributed', 'localized:<process>'")


def Variable(  # noqa: N802 - SOK's name
    initial_value: Any = None,
    trainable: bool = True,
    name: str | None = None,
    dtype: Any = None,
    *,
    shape: Sequence[int] | None = None,
    initializer: Any = None,
    mode: str | None = None,
    seed: int = 0,
) -> Any:
    """Return a table of fixed rows as a variable.

    Args:
        initial_value: rows (N, D); or None with `shape` and `initializer`.
        trainable, name, dtype: as of tf.Variable; float32, float16 or bfloat16.
        shape: (N, D).
        initializer: called with shape and dtype, as Keras' and TensorFlow's are.
        mode: "distributed", rows over all processes, or "localized:<process>", the table in one of them.
        seed: of stochastic rounding.
    """
    optional("name", name, str)
    expect("trainable", trainable, bool)
    kind = np.dtype(np.float32).name if dtype is None else type_name("dtype", dtype)
    if kind not in _ROWS:
        raise ConfigError("no such type of rows", value=kind, allowed=", ".join(_ROWS))
    if initial_value is None:
        if shape is None or initializer is None:
            raise ConfigError("a Variable needs initial_value, or shape and initializer")
        if not callable(initializer):
            raise ConfigError("initializer cannot be called", value=type(initializer).__name__,
                              allowed="tf.keras.initializers")  # fmt: skip
        sizes = tuple(number("shape", one, int) for one in listed("shape", shape))
        initial_value = initializer(sizes, dtype="float32")
    elif callable(initial_value):
        initial_value = initial_value()
    rows = float_rows("initial_value", initial_value)
    if rows.ndim != 2:
        raise ConfigError("a table is a matrix (N, D)", value=str(rows.shape))
    name = name or f"sok_static_Variable_{next(_static)}"
    table = Table(
        TableConfig(name=name, num_rows=rows.shape[0], dim=rows.shape[1], dtype=_ROWS[kind], init="zero"),
        _kind(mode), seed,
    )  # fmt: skip
    table.collection.copy_rows(name, torch.from_numpy(rows.copy()))
    return _wrap(table, trainable)


def DynamicVariable(  # noqa: N802 - SOK's name
    dimension: int,
    initializer: Any = None,
    var_type: str | None = None,
    name: str | None = None,
    constraint: Any = None,
    trainable: bool = True,
    key_type: Any = None,
    dtype: Any = None,
    mode: str | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return a table that grows with its keys as a variable.

    Args:
        dimension: D.
        initializer: None or "random": for "hbm" uniform in (-0.05, 0.05), for "hybrid" N(0, 1); "normal", "uniform"
            (0 to 1), "uniform:<low>:<high>", "normal:<mean>:<std>", "ones", "zeros", or a number as text.
        var_type: "hbm" or "hybrid" (default): here they differ in the initializer and in eviction alone.
        name, trainable: as of tf.Variable.
        constraint: None.
        key_type: int32 or int64; both may be looked up.
        dtype: float32.
        mode: as of `Variable`.
        seed: of initial values and admission.
        options: init_capacity, max_capacity (beyond it the key used longest ago goes; "kCustomized" is not known),
            evict_strategy, filter_ratio, most_keys (beyond it a new key raises). Options of GPU memory
            (max_hbm_for_vectors, ...) have no effect here, and a line of the log tells so.
    """
    for what, value in (("var_type", var_type), ("name", name)):
        optional(what, value, str)
    expect("trainable", trainable, bool)
    expect("dimension", dimension, int, np.integer)
    if not 1 <= dimension < 2**31:
        raise ConfigError("no such dimension", value=dimension, allowed="1 or more")
    kind = var_type or "hybrid"
    if kind not in ("hbm", "hybrid"):
        raise ConfigError("no such var_type", value=kind, allowed="'hbm', 'hybrid'")
    if constraint is not None:
        raise ConfigError("rows have no constraints", where="DynamicVariable")
    if dtype is not None and type_name("dtype", dtype) != "float32":
        raise ConfigError("dynamic rows are float32", value=str(dtype))
    if key_type is not None and type_name("key_type", key_type) not in ("int32", "int64"):
        raise ConfigError("no such type of keys", value=str(key_type), allowed="int32, int64")
    name = name or f"sok_dynamic_Variable_{next(_dynamic)}"
    config = DynamicTableConfig(
        name=name, dim=dimension, init=_law(initializer, kind), absent="initial", **_options(kind, options, name)
    )
    return _wrap(Table(config, _kind(mode), seed), trainable)


def _law(given: Any, kind: str) -> Any:
    optional("initializer", given, str, int, float)
    if given in (None, "", "random"):
        return UniformInit(low=-0.05, high=0.05) if kind == "hbm" else NormalInit(std=1.0)
    known = {
        "normal": NormalInit(std=1.0), "uniform": UniformInit(low=0.0, high=1.0), "ones": ConstantInit(value=1.0),
        "zeros": ConstantInit(value=0.0),
    }  # fmt: skip
    if given in known:
        return known[given]
    try:
        if isinstance(given, str) and given.count(":") == 2:
            law, first, second = given.split(":")
            low, high = float(first), float(second)
            return {"uniform": UniformInit(low=low, high=high), "normal": NormalInit(mean=low, std=high)}[law]
        return ConstantInit(value=float(given))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            "no such initializer", value=str(given), allowed=f"{', '.join(known)}, random, a number"
        ) from None


def _options(kind: str, given: dict[str, Any], name: str) -> dict[str, Any]:
    rest = dict(given)
    out: dict[str, Any] = {}
    without = [one for one in _MEMORY_OPTIONS if rest.pop(one, None) is not None]
    if without:
        _log.info("variable %r: %s have no effect here", name, ", ".join(without))
    capacity, most = rest.pop("init_capacity", None), rest.pop("max_capacity", None)
    limit = rest.pop("most_keys", None)
    strategy, ratio = rest.pop("evict_strategy", "kLru"), number("filter_ratio", rest.pop("filter_ratio", 1.0), float)
    if rest:
        raise ConfigError("unknown options", where=f"variable {name!r}", value=", ".join(rest))
    expect("evict_strategy", strategy, str, int)
    capacity, most, limit = (
        None if one is None else number(what, one, int)
        for what, one in (("init_capacity", capacity), ("max_capacity", most), ("most_keys", limit))
    )
    if strategy not in ("kLru", 0):
        raise ConfigError("no such evict_strategy", where=f"variable {name!r}", value=str(strategy), allowed="'kLru'")
    if most is not None and kind == "hybrid":
        out |= {"max_capacity": int(most), "when_full": "evict"}
    if limit is not None:
        out |= {"max_capacity": int(limit), "when_full": "raise"}
    if capacity is not None:
        out["initial_capacity"] = min(int(capacity), int(most) if "max_capacity" in out else int(capacity))
    if ratio < 1.0:
        out["admission"] = ProbabilityAdmission(probability=ratio)
    return out


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


def filter_variables(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the variables with tables, and the others."""
    variables = listed("variables", variables)
    own = [one for one in variables if isinstance(getattr(one, "viviane_table", None), Table)]
    return own, [one for one in variables if not isinstance(getattr(one, "viviane_table", None), Table)]


def file_name(variable: Any) -> str:
    """Return a table's name in files: punctuation becomes an underline."""
    name = table_of(variable).config.name
    return "".join("_" if one in string.punctuation else one for one in name)


def rows_of(variable: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys (N,), rising, and rows (N, D)."""
    table = table_of(variable)
    if isinstance(table.config, DynamicTableConfig):
        content = table.dynamic.export()
        order = torch.argsort(content.keys)
        return content.keys[order], content.weight[order].float()
    rows = table.collection.export_table(table.config.name).weight.float()
    return torch.arange(len(rows)), rows


def state_of(variable: Any) -> dict[str, torch.Tensor]:
    """Return a table's optimizer state by name, in the order of `rows_of`."""
    table = table_of(variable)
    if isinstance(table.config, DynamicTableConfig):
        content = table.dynamic.export()
        order = torch.argsort(content.keys)
        return {name: part[order].float() for name, part in content.state.items()}
    return {name: part.float() for name, part in table.collection.export_table(table.config.name).state.items()}


def export(variable: Any) -> tuple[Any, Any]:
    """Return a variable's keys (N,) and rows (N, D) as tensors."""
    tf = tensorflow()
    keys, rows = rows_of(variable)
    return tf.constant(keys.numpy()), tf.constant(rows.numpy())


def assign(variable: Any, indices: Any, values: Any) -> Any:
    """Put rows (N, D) under keys (N,); keys that a dynamic variable does not know are added.

    Raises:
        ConfigError: shapes differ, or a key is not in a fixed table.
    """
    table = table_of(variable)
    keys = torch.from_numpy(whole_numbers(np.asarray(indices), np.int64, "indices").ravel())
    rows = torch.from_numpy(float_rows("values", values).copy())
    if tuple(rows.shape) != (len(keys), table.config.dim):
        raise ConfigError(
            "rows do not fit", value=tuple(rows.shape), where=f"variable {table.config.name!r}",
            allowed=str((len(keys), table.config.dim)),
        )  # fmt: skip
    if isinstance(table.config, DynamicTableConfig):
        found = table.dynamic.find_or_insert(keys)
        table.dynamic.weight[found] = rows.to(table.dynamic.weight)
        return variable
    if len(keys) and not 0 <= int(keys.min()) <= int(keys.max()) < table.config.num_rows:
        raise ConfigError(
            "no such key", value=[int(keys.min()), int(keys.max())], allowed=f"0 to {table.config.num_rows - 1}"
        )
    whole = table.collection.export_table(table.config.name).weight
    whole[keys] = rows.to(whole)
    table.collection.copy_rows(table.config.name, whole)
    return variable


def incremental_model_dump(
    variables: Any, datetime_utc: Any, sess: Any = None
) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Return keys and rows that training used after a time, for each dynamic variable.

    Args:
        variables: one, or a list.
        datetime_utc: a datetime in UTC, or one for each variable.
        sess: None: TensorFlow 2 has no sessions.
    """
    if sess is not None:
        raise ConfigError("TensorFlow 2 has no sessions", fix="leave sess out")
    given = list(variables) if isinstance(variables, list | tuple) else [variables]
    times = list(datetime_utc) if isinstance(datetime_utc, list | tuple) else [datetime_utc] * len(given)
    if len(times) != len(given):
        raise ConfigError("times are one for each variable", value=len(times), allowed=str(len(given)))
    keys, rows = [], []
    for variable, moment in zip(given, times, strict=True):
        table = table_of(variable)
        content = table.dynamic.export(since=table.clock_at(_seconds(moment)))
        keys.append(content.keys.numpy())
        rows.append(content.weight.float().numpy())
    return keys, rows


def _seconds(moment: Any) -> float:
    from datetime import UTC

    if not isinstance(moment, datetime):
        raise ConfigError("a time is a datetime in UTC", value=str(moment))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
