"""Variables of TensorFlow whose rows are in Viviane's tables.

Shapes: N keys, D numbers a row.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

import numpy as np
import torch

from viviane.core.digits import number_in
from viviane.core.errors import ConfigError, expect
from viviane.core.logging import get_logger
from viviane.embedding import (
    ConstantInit,
    DynamicTableConfig,
    NormalInit,
    ProbabilityAdmission,
    TableConfig,
    UniformInit,
)
from viviane.tensorflow.arguments import float_rows, listed, number, optional, type_name, whole_keys
from viviane.tensorflow.host_calls import tensorflow
from viviane.tensorflow.processes import size
from viviane.tensorflow.table_variable import check_moved, has_table, table_of, variable_class
from viviane.tensorflow.tables import Table, gathered

_log = get_logger("tensorflow")
_static, _dynamic, _placed = itertools.count(), itertools.count(), itertools.count()
_MEMORY_OPTIONS: Final = (
    "max_hbm_for_vectors", "max_load_factor", "max_bucket_size", "block_size", "device_id", "io_by_cpu",
)  # fmt: skip
_ROWS: Final = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
_OF_TENSORFLOW: Final = (
    "validate_shape", "caching_device", "variable_def", "import_scope", "synchronization", "aggregation",
)  # fmt: skip
"""Options of tf.Variable that say nothing about rows."""


def _wrap(table: Table, trainable: bool, mode: str | None = None, key_type: Any = None) -> Any:
    tf = tensorflow()
    kind = tf.as_dtype(table.config.dtype)
    with tf.init_scope():
        variable = variable_class()(
            initial_value=tf.zeros((), kind), trainable=trainable, name=table.config.name, dtype=kind
        )
    variable.viviane_table, variable.mode, variable.key_type = table, mode or "distributed", key_type
    return variable


class _ByTable(type):
    """Of classes that make variables, which `isinstance` knows by their tables."""

    holds: Callable[[Any], bool]

    def __instancecheck__(cls, one: Any) -> bool:
        return has_table(one) and cls.holds(one)


class DistributedVariable(metaclass=_ByTable):
    """What isinstance(..., DistributedVariable) holds for: a fixed table with rows in all processes."""

    holds = staticmethod(lambda one: not table_of(one).is_dynamic and one.target_gpu < 0)


class LocalizedVariable(metaclass=_ByTable):
    """What isinstance(..., LocalizedVariable) holds for: a fixed table of one process."""

    holds = staticmethod(lambda one: not table_of(one).is_dynamic and one.target_gpu >= 0)


def _process(mode: str | None) -> int | None:
    """Return the process that has a table; None: all have a part of it."""
    optional("mode", mode, str)
    if mode in (None, "distributed"):
        return None
    process = number_in(mode[10:]) if isinstance(mode, str) and mode.startswith("localized:") else None
    if process is not None:
        if process >= size():
            raise ConfigError("no such process", where="mode", value=mode, allowed=f"localized:0 to {size() - 1}")
        return process
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
    constraint: Any = None,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return a table of fixed rows as a variable.

    Args:
        initial_value: rows (N, D); or None with `shape` and `initializer`.
        trainable, name, dtype: as of tf.Variable; float32, float16 or bfloat16.
        shape: (N, D).
        initializer: called with shape and dtype, as Keras' and TensorFlow's are; or the name of one of Keras'.
        mode: "distributed", rows over all processes, or "localized:<process>", the table in one of them.
        constraint: None.
        seed: of stochastic rounding.
        options: others of tf.Variable, which have no effect: validate_shape, caching_device, ...
    """
    optional("name", name, str)
    expect("trainable", trainable, bool)
    if constraint is not None:
        raise ConfigError("rows have no constraints", where="Variable")
    if unknown := sorted(set(options) - set(_OF_TENSORFLOW)):
        raise ConfigError("unknown options", where="Variable", value=", ".join(unknown))
    if callable(initial_value):
        initial_value = initial_value()
    if dtype is None:
        kind = str(getattr(getattr(initial_value, "dtype", None), "name", ""))
        kind = kind if kind in _ROWS else "float32"
    else:
        kind = type_name("dtype", dtype)
    if kind not in _ROWS:
        raise ConfigError("no such type of rows", value=kind, allowed=", ".join(_ROWS))
    if initial_value is None:
        initial_value = _drawn(shape, initializer)
    rows = float_rows("initial_value", initial_value)
    if rows.ndim != 2:
        raise ConfigError("a table is a matrix (N, D)", value=str(rows.shape))
    name = name or f"sok_static_Variable_{next(_static)}"
    table = Table(
        TableConfig(name=name, num_rows=rows.shape[0], dim=rows.shape[1], dtype=_ROWS[kind], init="zero"),
        _process(mode), seed,
    )  # fmt: skip
    table.collection.copy_rows(name, torch.from_numpy(rows.copy()))
    return _wrap(table, trainable, mode)


def _drawn(shape: Any, initializer: Any) -> Any:
    if shape is None or initializer is None:
        raise ConfigError("a Variable needs initial_value, or shape and initializer")
    if isinstance(initializer, str):
        try:
            initializer = tensorflow().keras.initializers.get(initializer)
        except (TypeError, ValueError) as error:
            raise ConfigError("no such initializer", value=initializer, allowed="tf.keras.initializers") from error
    if not callable(initializer):
        raise ConfigError("initializer cannot be called", value=type(initializer).__name__,
                          allowed="tf.keras.initializers")  # fmt: skip
    return initializer(tuple(number("shape", one, int) for one in listed("shape", shape)), dtype="float32")


class DynamicVariable(metaclass=_ByTable):
    """A table that grows with its keys as a variable.

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

    holds = staticmethod(lambda one: table_of(one).is_dynamic)

    def __new__(
        cls,
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
        """Return the variable, one of TensorFlow's: `isinstance` knows it by its table."""
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
        own = tensorflow().as_dtype("int64" if key_type is None else key_type)
        process = _process(mode)
        if process is None:  # the next one: tables are made in one order in all processes
            process = next(_placed) % size()
        return _wrap(Table(config, process, seed), trainable, mode, own)


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


def filter_variables(variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the variables with tables, and the others."""
    variables = listed("variables", variables)
    return [one for one in variables if has_table(one)], [one for one in variables if not has_table(one)]


def file_name(variable: Any) -> str:
    """Return a table's name in files: punctuation becomes an underline."""
    name = table_of(variable).config.name
    return "".join("_" if one in string.punctuation else one for one in name)


def rows_of(variable: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys (N,), rising, and rows (N, D), for files.

    Raises:
        LostUpdateError: an optimizer of TensorFlow's was given the variable: its rows have not moved.
    """
    table = table_of(variable)
    check_moved(variable)
    if table.num_pending:
        _log.warning("variable %r: %d gradients wait for apply_gradients and are not in its rows",
                     table.config.name, table.num_pending)  # fmt: skip
    return table.rows()


def export(variable: Any) -> tuple[Any, Any]:
    """Return a variable's keys (N,) and rows (N, D) as tensors."""
    tf = tensorflow()
    keys, rows = rows_of(variable)
    kind = variable.key_type or tf.int64
    return tf.cast(tf.constant(keys.numpy()), kind), tf.cast(tf.constant(rows.numpy()), variable.dtype)


def assign(variable: Any, indices: Any, values: Any) -> Any:
    """Put rows (N, D) under keys (N,); keys that a dynamic variable does not know are added.

    Raises:
        ConfigError: shapes differ, or a key is not in a fixed table.
    """
    table = table_of(variable)
    keys = torch.from_numpy(whole_keys("indices", indices).ravel().copy())
    table.put(keys, torch.from_numpy(float_rows("values", values).copy()))
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
        new_keys, new_rows = gathered(*table.rows_since(_seconds(moment)))
        keys.append(new_keys.numpy())
        rows.append(new_rows.numpy())
    return keys, rows


def _seconds(moment: Any) -> float:
    from datetime import UTC

    if not isinstance(moment, datetime):
        raise ConfigError("a time is a datetime in UTC", value=str(moment))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
