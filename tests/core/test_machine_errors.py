"""Refusals of the machine in other libraries' words, and what an interrupted writer leaves."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from viviane.core import exchange
from viviane.core.errors import DataError, MachineError
from viviane.core.machine_errors import as_own_error


@pytest.mark.parametrize("cause", [
    OSError(errno.EMFILE, "Too many open files"), MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed"),
    OSError("[Errno 24] Error creating pipe. Detail: [errno 24] Too many open files"),
    pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
    OSError(errno.ENOSPC, "No space left on device"),
])  # fmt: skip
def test_a_file_that_the_machine_refuses_to_open_is_not_damaged(cause: Exception) -> None:
    error = DataError("the file cannot be read", where="raw.csv")
    error.__cause__ = cause
    own = as_own_error(error)
    assert isinstance(own, MachineError)
    assert own.where == "raw.csv"
    assert own.fix is not None


def test_other_causes_keep_their_error() -> None:
    for cause in (OSError(errno.ENOENT, "No such file"), pa.ArrowInvalid("no Parquet"), DataError("another"), None):
        error = DataError("the file cannot be read")
        error.__cause__ = cause
        assert as_own_error(error) is error


def test_a_second_interrupt_during_the_removal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presses = [1]

    def press(path: Path, **options: Any) -> None:
        if presses.pop() if presses else 0:
            raise KeyboardInterrupt
        rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", press)
    with pytest.raises(KeyboardInterrupt), exchange.reserved(tmp_path / "out"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_writer_left_is_removed_without_its_lock(tmp_path: Path) -> None:
    left, other = tmp_path / ".out.viviane.0123abcd.tmp", tmp_path / ".else.viviane.0123abcd.tmp"
    for one in (left, other):
        one.mkdir()
    exchange.tidy(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [other]
