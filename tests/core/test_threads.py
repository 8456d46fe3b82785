"""Work on several items at once, by threads that may be refused."""

import threading
import time
from typing import NoReturn

import pytest

from viviane.core.threads import map_at_once


@pytest.mark.parametrize("most", [1, 2, 7, 100])
def test_results_are_in_the_order_of_the_items(most: int) -> None:
    def work(one: int) -> int:
        time.sleep(0.001 * (one % 3))
        return one * one

    assert map_at_once(work, iter(range(50)), most) == [one * one for one in range(50)]
    assert map_at_once(work, [], most) == []


def test_so_many_run_at_once() -> None:
    meeting = threading.Barrier(3, timeout=30)
    assert map_at_once(lambda one: meeting.wait() >= 0, range(3), 3) == [True] * 3


@pytest.mark.parametrize("most", [1, 4])
def test_the_first_error_is_raised_and_nothing_else_is_begun(most: int) -> None:
    begun: list[int] = []

    def work(one: int) -> None:
        begun.append(one)
        if one == 5:
            raise KeyboardInterrupt(one)
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt, match="5"):
        map_at_once(work, range(1000), most)
    assert 5 in begun
    assert len(begun) < 20


def test_without_further_threads_this_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_at_once(lambda one: -one, range(10), 8) == [-one for one in range(10)]
