from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for sample_rows: tests are not packages


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("viviane-")}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test ends without a thread that it started; the pool of the tiers, which a process keeps, may be there."""
    before = our_threads()
    yield
    deadline = time.monotonic() + 10
    while our_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert our_threads() <= before
