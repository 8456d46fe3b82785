"""Memory that Arrow frees and soon needs again."""

from __future__ import annotations

import os
import sys
from typing import Final

from viviane.core.lazy_names import collector_paused

_VARIABLE: Final = "MIMALLOC_PURGE_DELAY"
_MILLISECONDS: Final = "10000"


def keep_freed_memory() -> None:
    """Let Arrow keep the memory it frees for ten seconds, instead of hundredths, before the system gets it back.

    The kernel clears each page that it gives out again, which is a tenth of the time of a short ETL. Arrow's allocator
    reads the setting when it is loaded: without effect where pyarrow was imported before, and a value that the
    environment has is kept. https://microsoft.github.io/mimalloc/environment.html
    """
    if "pyarrow" in sys.modules or _VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = _MILLISECONDS
    try:
        with collector_paused():
            import pyarrow  # noqa: F401 - it reads the environment now
    finally:
        del os.environ[_VARIABLE]  # other programs that this one starts have their own
