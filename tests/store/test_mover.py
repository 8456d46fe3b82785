"""The thread beside lookups: it runs tasks in order and leaves nothing behind."""

import threading
import time

import pytest

from viviane.store import mover as mover_module
from viviane.store.mover import Mover


def test_thread_ends_without_tasks_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "_IDLE_SECONDS", 0.02)
    mover, seen, threads = Mover(), [], []

    def task() -> None:
        seen.append(len(seen))
        threads.append(threading.current_thread())

    for number in (1, 2):
        assert mover.offer(task, 1)
        assert mover.drain(5)
        assert len(seen) == number
        threads[-1].join(5)
        assert not threads[-1].is_alive()
    assert threads[0] is not threads[1]


def test_closed_movers_finish_the_running_task_and_take_no_other() -> None:
    mover, started, ended = Mover(), threading.Event(), []

    def slow() -> None:
        started.set()
        time.sleep(0.05)
        ended.append(True)

    assert mover.offer(slow, 1)
    assert started.wait(5)
    mover.close()
    assert ended == [True]
    assert not mover.offer(slow, 1)
    assert mover.num_left_out == 1
