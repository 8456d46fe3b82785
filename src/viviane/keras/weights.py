"""Rows in `model.get_weights()` and `set_weights()`, by which callbacks keep and restore a model in memory.

Keras lists a layer's variables, and rows are none. Their snapshot travels with the array of the layer's `anchor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from torch import Tensor

from viviane.core.errors import ConfigError


class AnchorArray(np.ndarray[Any, Any]):
    """The value of an anchor, with the rows of its layer's tables at the time.

    Results of arithmetic are plain arrays: the mean of two models' weights has no rows.

    Example:
        >>> kept = AnchorArray.of(np.zeros(()), {"t.weight": Tensor([1.0])})
        >>> sorted(kept.tables), type(kept + 1).__name__
        (['t.weight'], 'float64')
    """

    tables: Mapping[str, Tensor]

    @classmethod
    def of(cls, value: np.ndarray[Any, Any], tables: Mapping[str, Tensor]) -> AnchorArray:
        """Return a value with rows."""
        array = np.asarray(value).view(cls)
        array.tables = tables
        return array

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return what NumPy computed from this array as a plain array."""
        plain = np.asarray(array).view(np.ndarray)
        return plain[()] if return_scalar else plain

    def __reduce__(self) -> Any:
        """Let pickle and copy keep the rows."""
        return AnchorArray.of, (np.array(self), dict(self.tables))


def keep_rows(
    anchor: Any,
    where: str,
    snapshot: Callable[[], Mapping[str, Tensor]],
    restore: Callable[[Mapping[str, Tensor]], None],
) -> None:
    """Let an anchor's `numpy` bring a snapshot of the rows, and its `assign` restore it.

    Args:
        anchor: Keras' variable.
        where: for errors.
        snapshot: returns the rows.
        restore: puts them back.
    """
    read, write = anchor.numpy, anchor.assign

    def numpy() -> AnchorArray:
        return AnchorArray.of(read(), snapshot())

    def assign(value: Any) -> Any:
        if isinstance(value, AnchorArray):
            restore(value.tables)
            return write(np.array(value))
        if isinstance(value, np.ndarray | np.generic):
            raise ConfigError(
                "these weights are without the rows of the layer's tables", where=where,
                fix="pass what get_weights() of a model with the same tables returned, or use model.save_weights and "
                "load_weights",
            )  # fmt: skip
        return write(value)

    anchor.numpy, anchor.assign = numpy, assign


def keep_against_arrays(variable: Any, follows: Callable[[], bool]) -> None:
    """Let `set_weights`, which assigns arrays, pass a variable by: the rate of a table, and its place in a schedule.

    With the stock layer both are the optimizer's, which callbacks that restore weights leave as it is.

    Args:
        variable: of the layer.
        follows: whether the layer follows an optimizer now, whose rate is the one to set.
    """
    write = variable.assign

    def assign(value: Any) -> Any:
        return variable if isinstance(value, np.ndarray | np.generic) and follows() else write(value)

    variable.assign = assign


def rows_alone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the part of tables' state that is rows: of dynamic tables all of it.

    Example:
        >>> one, keys = Tensor([1.0]), Tensor([2.0])
        >>> sorted(rows_alone({"t.weight": one, "t.m": one, "d.keys": keys, "d.weight": one, "d.state.m": one}))
        ['d.keys', 'd.state.m', 'd.weight', 't.weight']
    """
    dynamic = tuple(name.removesuffix("keys") for name in state if name.endswith(".keys"))
    return {
        name: tensor.detach()
        for name, tensor in state.items()
        if name.endswith(".weight") or name.startswith(dynamic or ("\0",))
    }


def plain_assign(variable: Any, value: Any) -> None:
    """Assign an array to a variable of a layer, whose rows are set by other means."""
    variable.assign(keras.ops.convert_to_tensor(value, dtype=variable.dtype))
