"""Functions by name: what a config may call, registered by the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from viviane.core.errors import DataError
from viviane.core.registry import Registry

ColumnFunction: TypeAlias = Callable[..., Any]
"""From one pyarrow array a source to as many values: a pyarrow array, a numpy array or a list."""

FUNCTIONS: Final[Registry[ColumnFunction]] = Registry("function")


def register_function(name: str) -> Callable[[ColumnFunction], ColumnFunction]:
    """Return a decorator that makes a function known to configs under a name.

    The function gets one pyarrow array for each source column and returns one value a row (missing: None or NaN). It
    must look at each row by itself: it is called for pieces of the data, of any size. A fitted ETL keeps the name
    alone, so that the program that applies it has to register the same function.

    Raises:
        ConfigError: the name is taken.

    Example:
        >>> import pyarrow.compute as pc
        >>> @register_function("initial")
        ... def initial(names):
        ...     return pc.utf8_slice_codeunits(names, 0, 1)
        >>> "initial" in FUNCTIONS
        True
    """
    return FUNCTIONS.register(name)


def register_absent(names: Iterable[str]) -> None:
    """Make names known to a process that reads a config and has no use for its functions, such as a worker of Spark."""
    for name in names:
        if name not in FUNCTIONS:
            FUNCTIONS.register(name)(partial(_absent, name))


def _absent(name: str, *_: Any) -> Any:
    raise DataError("a function is not registered in this process", value=name)


def call_function(name: str, columns: list[Any], kind: pa.DataType, column: str) -> Any:
    """Call a registered function, and check what it returns.

    Args:
        kind: type of the new column.
        column: its name, for messages.

    Raises:
        DataError: it failed, or returned another number of rows or values of another type.
    """
    where = f"column {column!r}, function {name!r}"
    try:
        found = FUNCTIONS[name](*columns)
    except Exception as error:
        raise DataError(
            "a registered function failed", where=where, value=f"{type(error).__name__}: {error}"
        ) from error
    found = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    try:
        # from_pandas: NaN in floats is a missing value, as it does in raw files
        made: Any = found if isinstance(found, pa.Array) else pa.array(found, from_pandas=True)
        made = made.cast(kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            "a registered function returned values of another type", where=where, value=str(error), allowed=str(kind)
        ) from error
    if len(made) != len(columns[0]):
        raise DataError(
            "a registered function returned another number of rows",
            where=where, value=len(made), allowed=str(len(columns[0])),
        )  # fmt: skip
    return made
