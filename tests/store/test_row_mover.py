"""The ordered thread that moves rows: order, errors, and the end of the process."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from viviane.store.row_mover import RowMover


def _fails() -> None:
    raise ValueError("a broken disk")


def test_an_error_is_raised_by_the_next_call_and_no_later_job_runs() -> None:
    mover, seen = RowMover("moves"), []
    mover.start(_fails)
    with pytest.raises(ValueError, match="a broken disk"):
        mover.wait()
    later: Callable[[], None] = lambda: seen.append(1)  # noqa: E731
    with pytest.raises(ValueError, match="a broken disk"):
        mover.start(later)
    assert seen == []


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_ends_after_the_jobs_under_way(kept: bool) -> None:
    """A daemon thread would be cut off in the middle of a job, or return from a driver's call into no interpreter."""
    program = f"""
import time
from viviane.store.row_mover import RowMover
mover = RowMover("moves")
mover.start(lambda: (time.sleep(0.3), print("written", flush=True)))
if not {kept}:
    del mover
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "written\n"
