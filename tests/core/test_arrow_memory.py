"""Arrow keeps freed memory for a while; the setting is seen in what its allocator says about itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

PROGRAM = """
import os
import sys
{before}
import viviane.etl
import pyarrow as pa
held = pa.array(range(1000))
print(pa.default_memory_pool().backend_name, os.environ.get("MIMALLOC_PURGE_DELAY"))
"""


def said(before: str = "", **environment: str) -> tuple[str, str]:
    """Return what the program and the allocator write."""
    program = PROGRAM.format(before=before)
    env = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    env |= {"MIMALLOC_VERBOSE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    if not done.stdout.startswith("mimalloc"):
        pytest.skip("Arrow has another allocator here")
    return done.stdout, done.stderr


def test_freed_memory_is_kept_and_the_environment_is_left_as_it_was() -> None:
    out, err = said()
    assert out == "mimalloc None\n"
    assert "'purge_delay': 10000" in err


def test_a_value_of_the_environment_stays() -> None:
    out, err = said(MIMALLOC_PURGE_DELAY="77")
    assert out == "mimalloc 77\n"
    assert "'purge_delay': 77" in err


def test_nothing_happens_where_arrow_is_there_already() -> None:
    out, err = said("import pyarrow")
    assert out == "mimalloc None\n"
    assert "'purge_delay': 10000" not in err
