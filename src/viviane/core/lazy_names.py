"""Names of a package that are imported when they are first used, so that a program loads what it needs."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

_FROZEN_AT_START: Final = 2000
"""Python 3.12 and later begin with a few hundred frozen objects of their own."""


def lazy_names(
    package: str, homes: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package (PEP 562) whose names are in other modules.

    Args:
        package: its `__name__`.
        homes: module to the names that come from it.

    Raises:
        AttributeError: by `__getattr__`, for a name that is in none of them.

    Example:
        >>> get, _ = lazy_names("viviane.config", {"viviane.config.optimizers": ("Adam",)})
        >>> get("Adam").__module__
        'viviane.config.optimizers'
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collector_paused():
            module = importlib.import_module(home_of[name])
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home_of})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, whose objects stay: it would run over a hundred times.

    Afterwards these objects are in the oldest generation, where the collections would have moved them.
    """
    if not gc.isenabled() or gc.get_freeze_count() > _FROZEN_AT_START:  # a program that decides about this itself
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # from all generations, without a look at each object
        gc.unfreeze()  # to the oldest one
        gc.enable()
