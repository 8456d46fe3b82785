from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for sample_rows: tests are not packages


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("viviane-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test ends without a thread of ours."""
    yield
    deadline = time.monotonic() + 10
    while reader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not reader_threads()
