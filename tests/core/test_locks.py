"""Locks on outputs: who holds one is said, a dead holder does not block, nothing stays behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from viviane.core.errors import ConfigError
from viviane.core.exchange import reserved
from viviane.core.locks import hidden_name, is_held, locked

HOLD = """
import sys, time
from pathlib import Path
from viviane.core.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_another_process_is_named_and_a_dead_one_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with held_elsewhere(path) as process:
        with pytest.raises(ConfigError, match="another process is writing here") as caught, locked(path):
            pass
        assert f"process {process.pid} on " in str(caught.value)
        assert str(path) in str(caught.value)
        (tmp_path / "alias").symlink_to("out")
        with pytest.raises(ConfigError, match="another process"), locked(tmp_path / "alias"):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert hidden_name(path, "lock").exists(), "a killed process cannot remove it"
    with locked(path):
        assert is_held(path)
    assert not is_held(path)
    assert [one.name for one in tmp_path.iterdir()] == ["alias"]


def test_one_thread_may_hold_it_twice_another_may_not(tmp_path: Path) -> None:
    said: list[str] = []

    def other() -> None:
        try:
            with locked(tmp_path / "out"):
                pass
        except ConfigError as error:
            said.append(str(error))

    with locked(tmp_path / "out"):
        with locked(tmp_path / "out"):
            pass
        assert is_held(tmp_path / "out"), "the inner block must not give back what the outer one holds"
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "another thread of this process" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_does_not_hold_its_parent_s_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        child = os.fork()
        if child == 0:
            try:
                with locked(tmp_path / "out"):
                    os._exit(7)
            except ConfigError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_held(tmp_path / "out")


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    def fail() -> None:
        with reserved(tmp_path / "out"):
            raise RuntimeError("stop")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="stop"):
            fail()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_no_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No such file|Permission|Read-only|denied"), locked(Path("/proc/out")):
        pass


def test_long_names_have_locks(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 120)
    with reserved(path) as work:
        assert work.is_dir()
    assert list(tmp_path.iterdir()) == []
