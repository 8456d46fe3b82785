"""Methods under their old, deprecated names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """Return a method that warns and calls the method of the new name, also where a subclass overrides it.

    Example:
        >>> class Counter:
        ...     def count(self, step=1):
        ...         return step
        ...     tally = renamed_method("tally", "count")
        >>> with warnings.catch_warnings(record=True) as found:
        ...     warnings.simplefilter("always")
        ...     Counter().tally(step=2), str(found[0].message)
        (2, 'Counter.tally is now count')
    """

    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{type(self).__name__}.{old} is now {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)(*args, **kwargs)

    call.__name__, call.__doc__ = old, f"Call `{new}`: the old, deprecated name."
    return call
